"""Activations that wait in host memory, on the emulated device: bytes, digits, and the order of copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.memory_accounts import PLAIN_TASK, check_accounts
from tests.support.softcuda.trainings.strategies import OFFLOADED, EmulatedTraining, waits_of_a_step

CODE = """
import torch
from torch import nn
from unipar.model import activation_offload
from unipar.model.activation_offload import _BlockCall as Call, _CopyStream as Stream

def train(offloads, backwards=1):
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid()) for _ in range(6)]
    model = nn.Sequential(*blocks).cuda()
    if offloads:
        activation_offload.offload_activations(model, [str(i) for i in range(6)])
    x = torch.randn(1024, 64, device="cuda")
    base, pinned = torch.cuda.memory_allocated(), torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        after = torch.cuda.memory_allocated() - base
        for i in range(backwards):
            loss.backward(retain_graph=i < backwards - 1)
        losses.append(loss.item())
    return dict(digits=[losses, [p.grad.tolist() for p in model.parameters()]], after=after,
                peak=torch.cuda.max_memory_allocated() - base, left=torch.cuda.memory_allocated() - base,
                host=torch.cuda.host_memory_stats()["allocated_bytes.current"] - pinned)
"""

SAVED = 1024 * 64 * 4
"""Bytes of an activation: each block saves its input, the first activation, and the second, the next one's input."""


def test_bytes_digits_and_order(emulated: EmulatedDevice) -> None:
    """The device holds what two of six blocks save, the host that of five; gradients are equal bit for bit."""
    run = emulated.run(CODE + "result = [train(False), train(True)]")
    plain, moved = run.result
    assert moved["digits"] == plain["digits"]
    assert (plain["after"] - moved["after"], plain["peak"] - moved["peak"]) == (9 * SAVED, 9 * SAVED)
    assert (plain["host"], moved["host"]) == (0, 11 * SAVED)  # the batch, and two of each block but the last one's
    assert moved["left"] == plain["left"]
    assert run.texts("race") == []


def test_a_second_backward(emulated: EmulatedDevice) -> None:
    """What has come back once comes back again."""
    run = emulated.run(CODE + "result = [train(False, 2), train(True, 2)]")
    plain, moved = run.result
    assert moved["digits"] == plain["digits"]
    assert moved["left"] == plain["left"]
    assert run.texts("race") == []


FREED = "memory of 262144 bytes of the default stream of cuda:0 was freed while a copy on stream 1 of cuda:0 may still"
PLANTED = {
    "memory is used again before it was copied": (
        """
def leave(self):
    for memory in self._memories:
        memory.device = None
Call.leave = leave
""",
        FREED,
    ),
    "memory is copied before it was computed": (
        "torch.cuda.Stream.wait_stream = lambda self, other: None",
        "a copy on stream 1 of cuda:0 reads memory that aten::tanh on the default stream of cuda:0 wrote",
    ),
    "backward reads before memory is back": (
        """
wait = Call.wait
Call.wait = lambda self: self._events.clear() if self._in_backward else wait(self)
""",
        "aten::tanh_backward on the default stream of cuda:0 reads memory that a copy on stream 1 of cuda:0 wrote",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_missing_wait(fault: str, emulated: EmulatedDevice) -> None:
    """Each of the three waits, left out, is found."""
    plant, text = PLANTED[fault]
    races = emulated.run(f"{CODE}{plant}\nresult = train(True)").texts("race")
    assert [race for race in races if race.startswith(text)] != []


def test_a_change_in_place_is_an_error(emulated: EmulatedDevice) -> None:
    """A tensor that has changed since autograd saved it is named, where torch would find it in backward."""
    code = """
class Changing(nn.Module):
    def forward(self, x):
        y = x.exp()
        y.add_(1)
        return y
model = nn.Sequential(Changing(), nn.Linear(64, 64)).cuda()
activation_offload.offload_activations(model, ["0", "1"])
try:
    model(torch.ones(8, 64, device="cuda", requires_grad=True))
except Exception as e:
    result = f"{type(e).__name__}: {e}"
"""
    assert emulated.run(CODE + code).result == (
        "TaskError: a tensor of 512 elements that backward needs was changed in place after it was saved; torch itself "
        "raises an error in its backward, and with model.offload: none says where"
    )


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(t, id=t.name, marks=() if t.name.startswith("native/nothing+tensor2") else pytest.mark.emulated)
        for t in OFFLOADED
    ],
)
def test_strategies(training: EmulatedTraining, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Losses are those of the same training without offload, bit for bit, and the host waits for nothing else."""
    plain = training.run(emulated, "fp32", tmp_path / "plain")
    offloaded = training.beside({"offload": "activations"})
    moved = offloaded.run(emulated, "fp32", tmp_path / "moved")
    assert moved.result
    assert moved.result == plain.result
    assert moved.texts("race") == []
    assert waits_of_a_step(offloaded, moved) == waits_of_a_step(training, plain)


@pytest.mark.emulated
def test_accounts_and_plans(emulated: EmulatedDevice) -> None:
    """Accounts close to the byte, and plans are near them."""
    names = ("native/nothing", "native/parameters", "native/nothing+tensor2", "native/nothing+pipeline2")
    task = {"use": PLAIN_TASK, "args": {"layers": 5, "width": 64, "heads": 2, "context": 32}}
    trainings = [EmulatedTraining(name) for name in names]
    checks = check_accounts(emulated, "fp32", trainings, task=task, model={"offload": "activations"})
    assert list(checks) == ["single", *names]
    assert {strategy: str(check) for strategy, check in checks.items() if not check.is_good} == {}
