"""Activations that wait in host memory, on the emulated device: bytes, digits, and the order of copies."""

from __future__ import annotations

import pytest

from tests.support.softcuda.processes import EmulatedDevice

CODE = """
import torch
from torch import nn
from unipar.model import activation_offload

def train(offloads, backwards=1):
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid()) for _ in range(6)]
    model = nn.Sequential(*blocks).cuda()
    if offloads:
        activation_offload.offload_activations(model, [str(i) for i in range(6)])
    x = torch.randn(1024, 64, device="cuda")
    base = torch.cuda.memory_allocated()
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        after = torch.cuda.memory_allocated() - base
        for i in range(backwards):
            loss.backward(retain_graph=i < backwards - 1)
        losses.append(loss.item())
    return dict(losses=losses, grads=[p.grad.tolist() for p in model.parameters()], after=after,
                peak=torch.cuda.max_memory_allocated() - base, left=torch.cuda.memory_allocated() - base)
"""




def test_bytes_and_digits(emulated: EmulatedDevice) -> None:
    """The device holds what two of six blocks save, and gradients are equal bit for bit; no wait is missing."""
    run = emulated.run(CODE + "result = [train(False), train(True)]")
    plain, moved = run.result
    assert (moved["losses"], moved["grads"]) == (plain["losses"], plain["grads"])
    saved = 1024 * 64 * 4
    assert (plain["peak"] - moved["peak"]) == 9 * saved
    assert moved["left"] == plain["left"]
    assert run.texts("race") == []


PLANTED = {
    "before memory is used again": "activation_offload._BlockCall.leave.__globals__",
}


@pytest.mark.parametrize("which", [0,1,2])
def test_a_missing_wait(which, emulated):
    plant = ["""
def leave(self):
    for memory in self._memories:
        memory.device = None
activation_offload._BlockCall.leave = leave
""", """
def copy(self, pairs):
    with self._module.stream(self._stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    return self._stream.record_event()
activation_offload._CopyStream.copy = copy
""", """
activation_offload._CopyStream.wait = lambda self, event: None
"""][which]
    run = emulated.run(CODE + plant + "result = train(True)")
    print(which, *run.texts("race"), sep="\n")

def test_twice(emulated: EmulatedDevice) -> None:
    run = emulated.run(CODE + "result = [train(False, 2), train(True, 2)]")
    plain, moved = run.result
    assert (moved["losses"], moved["grads"]) == (plain["losses"], plain["grads"])
    print(*[[r[k] for k in ("after", "peak", "left")] for r in (plain, moved)])
    assert run.texts("race") == []
