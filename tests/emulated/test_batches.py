"""Batches on their way to the emulated device: no host waits for them, and no step reads them too early."""

from __future__ import annotations

import pytest

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


def test_a_batch_that_moves_itself(emulated: EmulatedDevice) -> None:
    """The host does not wait for a tokenizer's batch, nor for one that pins itself, as DataLoader has it do."""
    pytest.importorskip("transformers")
    run = emulated.run(f"""{MOVED}
from transformers import BatchEncoding
class Pinning:
    def __init__(self, x):
        self.x = x
    def pin_memory(self):
        return Pinning(self.x.pin_memory())
    def to(self, device, non_blocking=False):
        return Pinning(self.x.to(device, non_blocking=non_blocking))
tokens = BatchEncoding({{"ids": torch.arange(4.0)}})
moved = [to_device(tokens, device)["ids"], to_device(Pinning(torch.ones(2)), device).x]
again = to_device(Pinning(moved[1]), device).x is moved[1]
result = [*(x.sum().item() for x in moved), again, str(tokens["ids"].device)]
""")
    assert run.result == [6.0, 2.0, True, "cpu"], run.stderr
    assert run.texts("wait") == ["item", "item"]
    assert run.texts("unpinned") == []
    assert run.texts("race") == []


def test_a_batch_that_moves_itself_at_once(emulated: EmulatedDevice) -> None:
    """A `to` that takes the device alone is called with it alone."""
    run = emulated.run(f"""{MOVED}
class Plain:
    def to(self, device):
        return [torch.ones(2).to(device)]
result = [str(x.device) for x in to_device(Plain(), device)]
""")
    assert run.result == ["cuda:0"], run.stderr
