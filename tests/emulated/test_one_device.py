"""One process and its device, as unipar's door to it has them: memory, random numbers, waiting, names."""

from __future__ import annotations

from pathlib import Path

from tests.support.softcuda.findings import read_findings
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import write_config

DOOR = """
import torch
from unipar.distributed import device as door
one = torch.device("cuda:1")
torch.cuda.init()
"""


def test_memory_of_a_device(emulated: EmulatedDevice) -> None:
    """Bytes of tensors and their peak are those of the device that is asked, and the peak begins anew."""
    run = emulated.run(f"""{DOOR}
kept = torch.zeros(1000, device=one)
freed = torch.zeros(2000, device=one)
del freed
def both(count):
    return [count(torch.device("cuda:0")), count(one)]
result = [both(door.bytes_allocated), both(door.peak_bytes_allocated), both(door.bytes_reserved)]
door.forget_peaks(one)
result += [both(door.peak_bytes_allocated), both(door.peak_bytes_reserved)]
free, total = door.free_and_total_bytes(one)
result += [total - free, door.available_bytes(one) - free]
""")
    reserved = 2 << 20
    peaks = [[0, 4096], [0, 4096 + 8192], [0, reserved], [0, 4096], [0, reserved]]
    assert run.result == [*peaks, reserved, reserved - 4096], run.stderr


def test_a_share_of_the_memory(emulated: EmulatedDevice) -> None:
    """The limit holds on the device that it is for, and on no other."""
    run = emulated.run(
        f"""{DOOR}
door.limit_memory(one, 0.25)
torch.zeros(3 << 20, dtype=torch.uint8, device="cuda:0")
try:
    torch.zeros(3 << 20, dtype=torch.uint8, device=one)
except torch.OutOfMemoryError:
    result = "refused"
""",
        memory=8 << 20,
    )
    assert run.result == "refused", run.stderr


def test_memory_that_is_kept_for_reuse(emulated: EmulatedDevice) -> None:
    """Memory that no tensor has is given back to the device."""
    run = emulated.run(f"""{DOOR}
freed = torch.zeros(4 << 20, dtype=torch.uint8, device=one)
del freed
before = door.bytes_reserved(one)
door.release_unused_memory(one)
result = [before, door.bytes_reserved(one)]
""")
    assert run.result == [4 << 20, 0], run.stderr


def test_random_numbers_of_a_device(emulated: EmulatedDevice) -> None:
    """The state is that of the device that is asked, and goes back to it from a tensor that is on the device."""
    run = emulated.run(f"""{DOOR}
torch.cuda.manual_seed_all(1)
torch.rand(1, device=one)
state = door.generator_state(one)
drawn = torch.rand(2, device=one)
door.set_generator_state(state.to(one), one)
again = torch.rand(2, device=one)
result = [torch.equal(drawn, again), torch.equal(state, door.generator_state(torch.device("cuda:0")))]
""")
    assert run.result == [True, False], run.stderr


def test_waiting_for_a_device(emulated: EmulatedDevice) -> None:
    """A copy to pinned memory is there once its device was waited for."""
    run = emulated.run(f"""{DOOR}
to = torch.empty(2, pin_memory=True)
to.copy_(torch.ones(2, device=one), non_blocking=True)
before = bool(to.isnan().all())
door.synchronize(one)
result = [before, to.tolist()]
""")
    assert run.result == [True, [1.0, 1.0]], run.stderr
    assert run.texts("wait") == ["device"]


def test_the_device_of_a_rank(emulated: EmulatedDevice) -> None:
    """The device of a number, of the rank on its machine, or the only one that is visible becomes the current one."""
    code = """
import torch
from unipar.distributed.device import DeviceUnusable, select_device
try:
    found = select_device({kind!r}, {rank})
    result = [str(found), torch.cuda.current_device()]
except DeviceUnusable as e:
    result = str(e)
"""
    assert emulated.run(code.format(kind="cuda:1", rank=0)).result == ["cuda:1", 1]
    assert emulated.run(code.format(kind="cuda", rank=1)).result == ["cuda:1", 1]
    only = {"CUDA_VISIBLE_DEVICES": "1"}
    assert emulated.run(code.format(kind="cuda", rank=1), variables=only).result == ["cuda:0", 0]
    too_few = "torch sees 2 of them, and this rank needs number 2"
    assert emulated.run(code.format(kind="cuda", rank=2)).result == too_few


def test_names_of_devices(emulated: EmulatedDevice) -> None:
    """Each by its model, and by an identifier that no other device has."""
    run = emulated.run(f"""{DOOR}
ids = [door.device_uuid(torch.device("cuda", i)) for i in range(2)]
result = [door.list_device_names(), len(set(ids)), door.transport_of(one)]
result += [door.transport_version(), door.describe_build()]
""")
    names = ["NVIDIA A100-SXM4-80GB"] * 2
    assert run.result == [names, 2, "nccl", {"NCCL": "2.27.3"}, "CUDA 13.0"], run.stderr


def test_an_accounts_stream(emulated: EmulatedDevice) -> None:
    """The history of the allocator names streams by the number that the account looks for."""
    run = emulated.run(f"""{DOOR}
with torch.cuda.stream(torch.cuda.Stream(one)):
    number = door.stream_number(one)
    kept = torch.zeros(1000, device=one)
segments = [s for s in door.allocator_segments(one) if s["device"] == 1]
result = [number > 0, [s["stream"] == number for s in segments]]
""")
    assert run.result == [True, [True]], run.stderr


def test_seeds_of_a_device(emulated: EmulatedDevice) -> None:
    """Seeding a step seeds the device, too, if the process uses it."""
    run = emulated.run(f"""{DOOR}
from unipar.utils.seeding import seed_torch
drawn = []
for _ in range(2):
    seed_torch(5)
    drawn.append(torch.rand(3, device="cuda"))
result = torch.equal(*drawn)
""")
    assert run.result is True, run.stderr


def test_fp16s_gradients(emulated: EmulatedDevice) -> None:
    """An overflow is seen on the device, and gradients are divided by the scale where they are: no wait."""
    run = emulated.run(f"""{DOOR}
from unipar.engines.loss_scale import LossScaler
scaler = LossScaler(one)
grads = [torch.full((2,), 65536.0, device=one)]
scaler.unscale(grads)
norm = torch.tensor(float("inf"), device=one)
result = [t.tolist() for t in (*grads, scaler.overflow(norm), scaler.overflow(norm.zero_()))]
""")
    assert run.result == [[1.0, 1.0], True, False], run.stderr
    of_this_test = ["copy from pageable memory", *["copy to the host"] * 3]  # the norm, and what the last line shows
    assert run.texts("wait") == of_this_test


def test_all_tensors_of_a_model_are_placed(emulated: EmulatedDevice) -> None:
    """Buffers, and tensors that a module has as attributes or in lists, are on the device of the parameters."""
    run = emulated.run(f"""{DOOR}
from torch import nn
import torch.distributed as dist
from unipar.engines.placement import place_tensors
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
module = nn.BatchNorm1d(2)
module.plain, module.listed = torch.ones(2), [torch.ones(2)]
place_tensors(module, lambda p: p.to(one), one)
placed = [module.weight, module.running_mean, module.plain, module.listed[0]]
result = [str(tensor.device) for tensor in placed]
""")
    assert run.result == ["cuda:1"] * 4, run.stderr


def test_a_snapshot_is_pinned(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """An asynchronous checkpoint copies from the device to pinned memory only."""
    reports = tmp_path / "findings"
    reports.mkdir()
    done = emulated.unipar(["run", write_config(tmp_path, checkpoint={"every": 3, "async": True})], reports=reports)
    assert done.returncode == 0, done.stderr
    assert read_findings(reports, "wait") != [], "both ranks have used the device"
    assert [finding for finding in read_findings(reports, "unpinned") if finding.text == "to the host"] == []
