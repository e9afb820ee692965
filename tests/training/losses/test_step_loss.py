"""Several losses in a step: their order, their sum, their random numbers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

import unipar
from tests.support.run_logs import step_losses
from tests.support.running import Line, running
from unipar.errors import TaskError


class _Two(Line):
    """Squared errors, and the weight's square, in one step."""

    def __init__(self, *losses: Any) -> None:
        self.given = losses or (self.loss, self.decay)
        self.called: list[tuple[str, float]] = []
        self.drawn: list[float] = []

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        self.called.append(("loss", float(batch[0][0])))
        self.drawn.append(float(torch.rand(())))
        return super().loss(model, batch)

    def decay(self, model: Any, batch: Any) -> Tensor:
        self.called.append(("decay", float(batch[0][0])))
        self.drawn.append(float(torch.rand(())))
        return model.weight.square().sum()

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch, loss=list(self.given))


_ONE_STEP: dict[str, Any] = {"train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}}, "data": {"shuffle": False}}


def test_one_step_on_the_sum(tmp_path: Path) -> None:
    """All microbatches of the first loss, then those of the second; y = 2 x and w = 1 give 7.5 + 1, by hand."""
    task = _Two()
    with running(task, tmp_path, **_ONE_STEP) as run:
        weight: Any = run.parts["model"].module.weight
        torch.nn.init.constant_(weight, 1.0)
        task.train(run)
        after = weight.item()
    assert task.called == [("loss", 1.0), ("loss", 3.0), ("decay", 1.0), ("decay", 3.0)]
    assert step_losses(tmp_path) == [(1, pytest.approx(8.5))]
    assert after == pytest.approx(1.0 - 0.1 * (2 * -7.5 + 2 * 1.0))
    assert len(set(task.drawn)) == 4


def test_a_list_of_one_is_that_loss(tmp_path: Path) -> None:
    """Both draw the same random numbers."""
    alone, listed = _Two(), _Two()
    for name in ("alone", "listed"):
        (tmp_path / name).mkdir()
    listed.given = (listed.loss,)
    with running(alone, tmp_path / "alone", **_ONE_STEP) as run:
        unipar.Task.train(alone, run)
    with running(listed, tmp_path / "listed", **_ONE_STEP) as run:
        listed.train(run)
    assert listed.drawn == alone.drawn
    assert step_losses(tmp_path / "listed") == step_losses(tmp_path / "alone")


@pytest.mark.parametrize("given", [[], [7]])
def test_refused(tmp_path: Path, given: list[Any]) -> None:
    """What is no function is refused with what was given."""
    task = _Two()
    task.given = tuple(given)
    with pytest.raises(TaskError) as e, running(task, tmp_path, **_ONE_STEP) as run:
        task.train(run)
    assert str(e.value) == f"run.step(loss=...) takes a function, or a list of functions; it got {given!r}"
