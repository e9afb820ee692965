"""One loss through several parts: what each call computes, what is logged, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.run_logs import rows_of
from tests.support.running import running
from unipar.errors import TaskError


class Product(unipar.Task):
    """y = a b x in two parts, so that each gradient holds the other's weight."""

    def __init__(self, **changed: Any) -> None:
        self.changed = changed
        self.calls: list[tuple[str, bool]] = []

    @override
    def model(self) -> Any:
        parts = {name: nn.Linear(1, 1, bias=False) for name in "ab"}
        for part, value in zip(parts.values(), (2.0, 3.0), strict=True):
            nn.init.constant_(part.weight, value)
        return parts

    @override
    def data(self) -> Any:
        return TensorDataset(torch.ones(4, 1))

    def first(self, model: Any, batch: Any, outputs: Mapping[str, Any]) -> Any:
        self.calls.append(("a", torch.is_grad_enabled()))
        return model(batch[0])

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).mean()

    def last(self, model: Any, batch: Any, outputs: Mapping[str, Any]) -> Tensor:
        self.calls.append(("b", torch.is_grad_enabled()))
        return model(outputs["a"]).mean()

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            given: dict[str, Any] = {"through": {"a": self.first}, "part": "b", "loss": self.last}
            run.step_through(local_batch, **given | self.changed)


_ONE_STEP: dict[str, Any] = {"train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}}}


def test_both_gradients_are_of_the_weights_before_the_step(tmp_path: Path) -> None:
    """d(a b)/da = b = 3 and d(a b)/db = a = 2; the part that steps second does not see the first one's update."""
    task = Product()
    with running(task, tmp_path, **_ONE_STEP) as run:
        task.train(run)
        weights: dict[str, float] = {n: next(part.module.parameters()).item() for n, part in run.parts.items()}
    assert weights == {"a": pytest.approx(2.0 - 0.3), "b": pytest.approx(3.0 - 0.2)}
    assert task.calls == [("a", False)] * 2 + [("b", True)] * 2 + [("a", True)] * 2


def test_the_loss_is_logged_once(tmp_path: Path) -> None:
    """The logged loss is that of the part that computes it; the norm is that of both gradients, 2 and 3."""
    task = Product()
    with running(task, tmp_path, **_ONE_STEP) as run:
        task.train(run)
    (row,) = rows_of(tmp_path, "step")
    assert row["loss"] == pytest.approx(6.0)
    assert row["norm"] == pytest.approx(13.0**0.5)
    assert {name: part["loss"] for name, part in row["parts"].items()} == {"a": 0.0, "b": pytest.approx(6.0)}


def _other(model: Any, batch: Any, outputs: Mapping[str, Any]) -> Any:
    return model(batch[0]) * (2.0 if torch.is_grad_enabled() else 1.0)


def _words(model: Any, batch: Any, outputs: Mapping[str, Any]) -> Any:
    return "words"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"through": {}}, "run.step_through(part='b') takes functions of other parts, whose outputs its loss needs: "
         "through={'a': ...}; it got none"),
        ({"part": "a"}, "run.step_through(part='a') takes functions of other parts, whose outputs its loss needs: "
         "through={'b': ...}; it got a"),
        ({"through": {"c": _words}}, "there is no part 'c'; name one of a, b"),
        ({"through": {"a": _words}}, "run.step_through: a part's function returned no tensor; return what the loss "
         "needs of it"),
        ({"through": {"a": _other}}, "the function of part 'a' gave other values when microbatch 0 was computed again, "
         "with gradients (tensor 0 of them): it must be the same in both calls; draw random numbers from PyTorch's "
         "generators only, and let nothing of the first call change the second"),
        ({"loss": _other}, "loss() returned a tensor of shape (2, 1); return the mean over the batch as a scalar "
         "tensor"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """Parts that do not fit, and functions that return what cannot be used, with the way out."""
    task = Product(**changed)
    with pytest.raises(TaskError) as e, running(task, tmp_path, **_ONE_STEP) as run:
        task.train(run)
    assert str(e.value) == message
