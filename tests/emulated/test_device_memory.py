"""The emulated device's memory: what an allocator of CUDA promises, and what it refuses."""

from __future__ import annotations

import pytest

from tests.support.softcuda.processes import EmulatedDevice

MIB = 2**20


def test_fresh_memory_is_no_number(emulated: EmulatedDevice) -> None:
    """A tensor that nobody has written holds NaN, and -1 in integers."""
    run = emulated.run("""
import torch
floats = [torch.empty(3, device="cuda", dtype=d) for d in (torch.float32, torch.float16, torch.bfloat16)]
result = [all(bool(x.isnan().all()) for x in floats), torch.empty(2, device="cuda", dtype=torch.long).tolist()]
""")
    assert run.result == [True, [-1, -1]]


def test_memory_is_counted(emulated: EmulatedDevice) -> None:
    """Blocks are multiples of 512 bytes; the peak stays until it is reset; what was asked for is counted, too."""
    run = emulated.run("""
import torch
from torch import cuda
kept = torch.zeros(100, device="cuda")
freed = torch.zeros(1000, device="cuda")
del freed
result = [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_stats()["requested_bytes.all.current"]]
cuda.reset_peak_memory_stats()
result += [cuda.max_memory_allocated(), cuda.memory_reserved(), cuda.memory_allocated(1)]
""")
    assert run.result == [512, 512 + 4096, 400, 512, 2 * MIB, 0]


def test_out_of_memory(emulated: EmulatedDevice) -> None:
    """An allocation beyond the device's memory raises torch.OutOfMemoryError in the words of torch's allocator."""
    run = emulated.run(
        """
import torch
kept = torch.zeros(6 * 2**20, dtype=torch.uint8, device="cuda")
try:
    torch.zeros(3 * 2**20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as e:
    result = [str(e), torch.cuda.memory_stats()["num_ooms"], torch.zeros(2**20, device="cuda:1").numel()]
""",
        memory=8 * MIB,
    )
    assert run.result[0] == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 MiB of which 2.00 MiB is "
        "free. Including non-PyTorch memory, this process has 6.00 MiB memory in use. Of the allocated memory 6.00 MiB "
        "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    assert run.result[1:] == [1, MIB]


def test_a_fraction_of_the_memory(emulated: EmulatedDevice) -> None:
    """set_per_process_memory_fraction is obeyed, and the error says so."""
    run = emulated.run(
        """
import torch
torch.cuda.set_per_process_memory_fraction(0.25)
torch.zeros(2**20, dtype=torch.uint8, device="cuda")
try:
    torch.zeros(3 * 2**20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as e:
    result = str(e)
""",
        memory=8 * MIB,
    )
    assert "2.00 MiB allowed; " in run.result


def test_history(emulated: EmulatedDevice) -> None:
    """The allocator's history names each allocation and each free, by address and size."""
    run = emulated.run("""
import torch
torch.cuda.memory._record_memory_history()
x = torch.zeros(100, device="cuda")
address = x.data_ptr()
del x
trace = torch.cuda.memory._snapshot()["device_traces"][0]
result = [(e["action"], e["size"], e["addr"] == address) for e in trace]
""")
    assert run.result == [["alloc", 400, True], ["free_requested", 400, True], ["free_completed", 400, True]]


def test_a_storage_grows(emulated: EmulatedDevice) -> None:
    """Storages are freed and taken again in place, as FSDP2 does, and the limit holds there, too."""
    run = emulated.run(
        """
import torch
x = torch.arange(4.0, device="cuda")
x.untyped_storage().resize_(0)
freed = torch.cuda.memory_allocated()
x.untyped_storage().resize_(16)
result = [freed, torch.cuda.memory_allocated(), bool(x.isnan().all())]
try:
    x.untyped_storage().resize_(2**24)
except torch.OutOfMemoryError as e:
    result.append(str(e)[:51])
""",
        memory=8 * MIB,
    )
    assert run.result == [0, 512, True, "CUDA out of memory. Tried to allocate 16.00 MiB. GP"]


def test_pinned_memory_is_counted(emulated: EmulatedDevice) -> None:
    """Pinned memory is rounded up to a power of two, and counted by host_memory_stats."""
    run = emulated.run("""
import torch
torch.cuda.init()
x = torch.zeros(300).pin_memory()
stats = torch.cuda.host_memory_stats()
result = [x.is_pinned(), torch.zeros(3).is_pinned(), stats["active_bytes.current"], stats["allocated_bytes.peak"]]
""")
    assert run.result == [True, False, 2048, 2048]


def test_memory_that_another_stream_still_uses(emulated: EmulatedDevice) -> None:
    """Freed memory that another stream uses is named when its own allocates again; record_stream prevents that."""
    code = """
import torch
side = torch.cuda.Stream()
x = torch.zeros(100, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x + 1
if RECORD:
    x.record_stream(side)
del x
y = torch.zeros(100, device="cuda")
result = True
"""
    forgotten = emulated.run(f"RECORD = False\n{code}")
    assert forgotten.texts("race") == [
        "memory of 512 bytes of the default stream of cuda:0 was freed while aten::add on stream 1 of cuda:0 may still "
        "use it: it is handed out again without record_stream or a wait"
    ]
    assert emulated.run(f"RECORD = True\n{code}").texts("race") == []


@pytest.mark.parametrize("of", ["cuda:0", "cuda:1"])
def test_generators(of: str, emulated: EmulatedDevice) -> None:
    """A device's random state is 16 bytes, seed and offset, gives the same numbers again, and is its own."""
    run = emulated.run(f"""
import torch
torch.manual_seed(7)
states = torch.cuda.get_rng_state_all()
x = torch.rand(4, device="{of}")
moved = [not torch.equal(a, b) for a, b in zip(states, torch.cuda.get_rng_state_all())]
torch.cuda.set_rng_state_all(states)
result = [states[0].numel(), moved, torch.equal(x, torch.rand(4, device="{of}")), torch.initial_seed()]
""")
    assert run.result == [16, [of == "cuda:0", of == "cuda:1"], True, 7]
