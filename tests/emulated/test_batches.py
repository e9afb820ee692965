"""Batches on their way to the emulated device: no host waits for them, and no step reads them too early."""

from __future__ import annotations

from tests.support.softcuda.processes import EmulatedDevice

MOVED = """
import torch
from unipar.engines.batch_transfer import to_device
device = torch.device("cuda:0")
torch.cuda.init()
"""


def test_nobody_waits_for_a_batch(emulated: EmulatedDevice) -> None:
    """Tensors of host memory are pinned, copied on a stream of their own, and there when the step reads them."""
    run = emulated.run(f"""{MOVED}
moved = to_device({{"x": torch.arange(4.0), "y": [torch.ones(2, dtype=torch.long), "a"]}}, device)
sums = moved["x"].sum() + moved["y"][0].sum()
before = [str(moved["x"].device), moved["y"][1]]
result = [*before, sums.item()]
""")
    assert run.result == ["cuda:0", "a", 8.0], run.stderr
    assert run.texts("wait") == ["item"]
    assert run.texts("unpinned") == []
    assert run.texts("race") == []


def test_a_copy_does_not_wait_for_the_step_before(emulated: EmulatedDevice) -> None:
    """Its stream is another one, which has waited for none of the work that was queued before."""
    run = emulated.run(f"""{MOVED}
from unipar.engines import batch_transfer as batch
before, host = torch.zeros(4, device=device), torch.zeros(4).pin_memory()
to_device(host, device)
with batch._copy_stream(device):
    before + 1
host.fill_(1)
torch.cuda.synchronize()
result = True
""")
    assert {text.partition(" of cuda:0 ")[0] for text in run.texts("race")} == {
        "aten::add on stream 1",
        "pinned memory changed before the copy from it on stream 1",
    }


def test_memory_of_a_batch_is_not_taken_while_the_step_reads_it(emulated: EmulatedDevice) -> None:
    """The next batch gets the memory of one that is freed only after the step's stream has read it."""
    run = emulated.run(f"""{MOVED}
batch = to_device(torch.zeros(1000), device)
read = batch * 2
del batch
result = to_device(torch.ones(1000), device).sum().item()
""")
    assert run.result == 1000.0
    assert run.texts("race") == []


def test_a_tensor_that_is_there_already_is_not_moved(emulated: EmulatedDevice) -> None:
    """A loader may have put it on the device."""
    run = emulated.run(f"""{MOVED}
here = torch.ones(2, device=device)
result = to_device((here, 3), device)[0] is here
""")
    assert run.result is True, run.stderr
