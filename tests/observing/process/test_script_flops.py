"""Operations of a script's step, counted without a change of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unipar.observing.process import script_flops
from unipar.observing.process.script_flops import ScriptFlops
from unipar.observing.process.step_phases import StepPhases
from unipar.profiling.work import RankWork

CPU = torch.device("cpu")
STEP = 3 * 2 * 4 * (8 * 16 + 16 * 8)
"""Operations of two matrices with four samples: one product in forward and two in backward for each."""


class Loop:
    """A training loop that tells its phases, as an observer does."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
        self.phases = StepPhases(self)
        self.flops = ScriptFlops(self.phases)

    def on_step_begin(self, step: int) -> None:
        self.flops.step_begins(step)

    def on_step_end(self, step: int) -> None:
        self.flops.step_ends(step, CPU)

    def on_steps_merged(self) -> None: ...

    def train(self, forward: Callable[[Tensor], Tensor], *, before: Callable[[], None] = lambda: None) -> RankWork:
        """Take three steps, `before` each of them something else, and return what was counted."""
        for _ in range(3):
            before()
            self.phases.gradients_dropped()
            loss = forward(torch.ones(4, 8, requires_grad=True)).sum()
            self.phases.backward_begins()
            loss.backward()
            self.phases.backward_ends()
            self.phases.update_begins("sgd")
            with torch.no_grad():
                torch.mm(torch.ones(16, 16), torch.ones(16, 16))
            self.phases.update_ends()
        assert self.flops.work is not None
        return self.flops.work

    def train_in_optimizer(self) -> RankWork:
        """Take three steps of an optimizer that computes the loss twice in its own step."""
        for _ in range(3):
            self.phases.gradients_dropped()
            self.phases.update_begins("lbfgs")
            for _ in range(2):
                loss = self.model(torch.ones(4, 8, requires_grad=True)).sum()
                self.phases.backward_begins()
                loss.backward()
                self.phases.backward_ends()
            self.phases.update_ends()
        assert self.flops.work is not None
        return self.flops.work


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that other tests of this process have compiled are not the script's."""
    monkeypatch.setattr(script_flops, "graphs_compiled", int)


def test_a_step_counts_forward_and_backward() -> None:
    """Products of the optimizer, and of an evaluation between two steps, do not count."""
    loop = Loop()

    def evaluate() -> None:
        with torch.no_grad():
            loop.model(torch.ones(4, 8))

    assert loop.train(loop.model, before=evaluate) == RankWork(flops=STEP, flops_by="in step 2")


def test_an_optimizer_that_computes_the_loss() -> None:
    """Each of its forwards and backwards counts."""
    assert Loop().train_in_optimizer().flops == 2 * STEP


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count_once(reentrant: bool) -> None:
    """What backward computes again is no work of the step."""
    loop = Loop()

    def forward(x: Tensor) -> Any:
        return checkpoint(loop.model, x, use_reentrant=reentrant)

    assert loop.train(forward).flops == STEP


def test_compiled_graphs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operations are not seen, which is said instead of a number that lacks them."""
    monkeypatch.setattr(script_flops, "graphs_compiled", lambda: 1)
    why = "the operations of a step were not counted: the script compiles a part of its model"
    assert Loop().train(torch.sin) == RankWork(notes=(why,))


def test_a_forward_without_known_operations() -> None:
    """A model without a product has no count."""
    why = "the operations of a step were not counted: the forward has no operation that PyTorch's counter knows"
    assert Loop().train(torch.sin) == RankWork(notes=(why,))
