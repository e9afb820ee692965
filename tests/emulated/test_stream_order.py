"""The emulated device's order: a forgotten wait reads NaN or is named, one that is there is neither."""

from __future__ import annotations

import pytest

from tests.support.softcuda.processes import EmulatedDevice

LATE_COPY = """
import torch
host = torch.zeros(4).pin_memory()
x = torch.arange(4.0, device="cuda")
host.copy_(x, non_blocking=True)
"""


def test_a_copy_to_the_host_is_late(emulated: EmulatedDevice) -> None:
    """Pinned memory holds NaN until the host has waited for a copy to it."""
    run = emulated.run(
        LATE_COPY + "before = bool(host.isnan().all())\ntorch.cuda.synchronize()\nresult = [before, host.tolist()]"
    )
    assert run.result == [True, [0.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    "wait",
    [
        "torch.cuda.current_stream().synchronize()",
        "event = torch.cuda.Event(); event.record(); event.synchronize()",
        "event = torch.cuda.Event(); event.record(); event.query()",
        "x.sum().item()",
    ],
)
def test_what_waits_for_a_late_copy(wait: str, emulated: EmulatedDevice) -> None:
    """The stream, an event after the copy, or a value that the stream computes after it."""
    assert emulated.run(f"{LATE_COPY}{wait}\nresult = host.tolist()").result == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "wait",
    [
        "torch.cuda.Stream().synchronize()",
        "event = torch.cuda.Event(); event.record(torch.cuda.Stream()); event.synchronize()",
    ],
)
def test_what_does_not_wait_for_a_late_copy(wait: str, emulated: EmulatedDevice) -> None:
    """Another stream, or an event of another stream."""
    assert emulated.run(f"{LATE_COPY}{wait}\nresult = bool(host.isnan().all())").result is True


def test_a_copy_to_pageable_memory_waits(emulated: EmulatedDevice) -> None:
    """Memory that is not pinned is written at once, asked for asynchronously or not; the former is counted."""
    run = emulated.run("""
import torch
host = torch.zeros(2)
host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
result = host.tolist()
""")
    assert run.result == [1.0, 1.0]
    assert run.texts("unpinned") == ["to the host"]


def test_pinned_memory_that_changes_too_early(emulated: EmulatedDevice) -> None:
    """Memory from which a copy still reads must not change; after an event it may."""
    code = """
import torch
host = torch.zeros(4).pin_memory()
x = host.to("cuda", non_blocking=True)
if WAIT:
    torch.cuda.current_stream().synchronize()
host.fill_(1)
torch.cuda.synchronize()
result = True
"""
    assert emulated.run(f"WAIT = False\n{code}").texts("race") == [
        "pinned memory changed before the copy from it on the default stream of cuda:0 was waited for"
    ]
    assert emulated.run(f"WAIT = True\n{code}").texts("race") == []


ACROSS_STREAMS = """
import torch
side = torch.cuda.Stream()
x = torch.zeros(4, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x.add_(1)
{wait}
y = x * 2
result = y.tolist()
"""


def test_a_read_that_did_not_wait(emulated: EmulatedDevice) -> None:
    """What another stream writes is read in a race; the text names both operators and both streams."""
    assert emulated.run(ACROSS_STREAMS.format(wait="")).texts("race") == [
        "aten::mul on the default stream of cuda:0 reads memory that aten::add on stream 1 of cuda:0 wrote, and has "
        "not waited for it"
    ]


@pytest.mark.parametrize(
    "wait",
    [
        "torch.cuda.current_stream().wait_stream(side)",
        "event = side.record_event(); event.wait()",
        "side.synchronize()",
        "torch.cuda.synchronize()",
    ],
)
def test_a_read_that_waited(wait: str, emulated: EmulatedDevice) -> None:
    """A wait of the stream or of the host orders the accesses."""
    run = emulated.run(ACROSS_STREAMS.format(wait=wait))
    assert (run.result, run.texts("race")) == ([2.0] * 4, [])


def test_an_event_covers_what_is_before_it(emulated: EmulatedDevice) -> None:
    """What a stream does after the event was recorded is not waited for."""
    code = ACROSS_STREAMS.replace("    x.add_(1)\n", "    event = side.record_event()\n    x.add_(1)\n")
    assert len(emulated.run(code.format(wait="event.wait()")).texts("race")) == 1


def test_a_copy_between_devices_orders_both(emulated: EmulatedDevice) -> None:
    """The current streams of both wait for each other, as CUDA's do; another stream's work is not waited for."""
    code = """
import torch
x = torch.ones(4, device="cuda:0")
side = torch.cuda.Stream("cuda:0")
with torch.cuda.stream(side) if SIDE else torch.cuda.device(0):
    x.add_(1)
y = x.to("cuda:1")
x.fill_(0)
result = y.sum().item()
"""
    runs = [emulated.run(f"SIDE = {side}\n{code}") for side in (False, True)]
    assert [run.result for run in runs] == [8.0, 8.0]
    assert runs[0].texts("race") == []
    assert any("a copy" in text for text in runs[1].texts("race"))


def test_parts_of_a_tensor(emulated: EmulatedDevice) -> None:
    """Streams may write different rows of one tensor; a write of bytes that are being read is a race."""
    run = emulated.run("""
import torch
side = torch.cuda.Stream()
x = torch.zeros(2, 4, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x[1].add_(1)
    y = x[1] + 1
x[0].add_(1)
x.fill_(0)
result = True
""")
    assert [text.partition(" on ")[0] for text in run.texts("race")] == ["aten::fill_", "aten::fill_"]
    assert sorted(text.rpartition(", and")[0].rpartition(" ")[2] for text in run.texts("race")) == ["read", "wrote"]


def test_waits_of_the_host(emulated: EmulatedDevice) -> None:
    """Each is counted with its reason and the line that waits."""
    run = emulated.run("""
import torch
x = torch.arange(3.0, device="cuda")
x[0].item()
x.nonzero()
x.tolist()
torch.tensor([1.0], device="cuda")
torch.cuda.synchronize()
torch.cuda.Event().synchronize()
counts = x.long()
counts.repeat_interleave(counts)
counts.repeat_interleave(counts, output_size=3)
result = True
""")
    waits = [(f.text, f.where[0].rpartition(":")[2]) for f in run.findings if f.kind == "wait"]
    assert waits == [
        ("item", "4"),
        ("nonzero", "5"),
        ("copy to the host", "6"),
        ("copy from pageable memory", "7"),
        ("device", "8"),
        ("repeat_interleave", "11"),
    ]


def test_nothing_waits_in_a_step(emulated: EmulatedDevice) -> None:
    """Forward, backward and a fused update of a model run without the host."""
    run = emulated.run("""
import torch
model = torch.nn.Linear(4, 4, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.ones(2, 4).pin_memory()
torch.cuda.synchronize()
for _ in range(2):
    optimizer.zero_grad()
    model(x.to("cuda", non_blocking=True)).square().mean().backward()
    optimizer.step()
result = True
""")
    assert run.texts("wait") == ["device"]
    assert run.result is True


def test_time_between_events(emulated: EmulatedDevice) -> None:
    """Events are as far apart as the host's clock says."""
    run = emulated.run("""
import time
import torch
first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
first.record()
time.sleep(0.05)
second.record()
torch.cuda.synchronize()
result = first.elapsed_time(second)
""")
    assert 50 <= run.result < 5000


def test_a_device_after_a_fork(emulated: EmulatedDevice) -> None:
    """A process that has used a device passes it to no fork: torch refuses to start CUDA, and a kernel fails."""
    run = emulated.run("""
import os
import torch
x = torch.ones(2, device="cuda")
reading, writing = os.pipe()
if not os.fork():
    said = []
    for use in (lambda: torch.ones(2, device="cuda"), lambda: x + 1):
        try:
            use()
            said.append("works")
        except Exception as e:
            said.append(f"{type(e).__name__}: {e}".splitlines()[0])
    os.write(writing, "|".join(said).encode())
    os._exit(0)
os.wait()
result = os.read(reading, 10000).decode().split("|")
""")
    again = (
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
        "start method"
    )
    assert run.result == [f"RuntimeError: {again}", "AcceleratorError: CUDA error: initialization error"]


@pytest.mark.parametrize(("profile", "spoils"), [("a100", False), ("no-count", True)])
def test_a_question_before_a_fork(profile: str, spoils: bool, emulated: EmulatedDevice) -> None:
    """torch counts devices by NVML, which leaves forks alone; where that fails, by CUDA, which does not."""
    run = emulated.run(
        """
import os
import torch
count = torch.cuda.device_count()
pid = os.fork()
if not pid:
    os._exit(int(torch.cuda._is_in_bad_fork()))
result = [count, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
""",
        profile,
    )
    assert run.result == [2, int(spoils)]
