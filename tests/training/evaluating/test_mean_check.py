"""The first evaluation's check that numbers are means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.support.running import Line, running
from unipar.errors import TaskError
from unipar.training.evaluating.mean_check import split_in_halves


class Measured(Line):
    def __init__(self, metrics: Any) -> None:
        self._given = metrics
        self.calls = 0

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        self.calls += 1
        return self._given(model, batch)


_WAY_OUT = (
    ", so that the result would depend on how the data is cut; return the pair (mean, weight) if it is a mean over "
    "something else than samples, unipar.gathered(predictions, targets, score=function) or a torchmetrics Metric if "
    "it is none, or set eval.check: false"
)
REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda m, b: {"peak": b[0].max()},
     "metrics()['peak'] is no mean: the first batch gives 2 (weight 2), and its halves 1 (1) and 2 (1), of which the "
     "mean is 1.5"),
    (lambda m, b: {"count": len(b[0])},
     "metrics()['count'] is no mean: the first batch gives 2 (weight 2), and its halves 1 (1) and 1 (1), of which the "
     "mean is 1"),
    (lambda m, b: {"unweighed": (b[0] * b[0]).sum() / b[0].sum()},
     "metrics()['unweighed'] is no mean: the first batch gives 1.66667 (weight 2), and its halves 1 (1) and 2 (1), of "
     "which the mean is 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("metrics", "message"), REFUSED)
def test_a_number_that_is_no_mean_is_refused(tmp_path: Path, metrics: Any, message: str) -> None:
    """A maximum, a sum, a mean whose weight was not told: with the numbers that show it, and the ways out."""
    with pytest.raises(TaskError) as e, running(Measured(metrics), tmp_path) as run:
        run.evaluate()
    assert str(e.value) == message + _WAY_OUT


def test_without_the_check_it_is_averaged(tmp_path: Path) -> None:
    """`eval.check: false`."""
    with running(Measured(REFUSED[0][0]), tmp_path, eval={"check": False}) as run:
        assert run.evaluate() == {"peak": 6.0}


ACCEPTED: dict[str, Callable[[Any, Any], Any]] = {
    "a mean": lambda m, b: {"x": b[0].mean()},
    "a mean with its weight": lambda m, b: {"x": ((b[0] * b[0]).sum() / b[0].sum(), b[0].sum())},
    "one that draws random numbers": lambda m, b: {"x": (b[0] * torch.rand(len(b[0]), 1)).max()},
    "not a number": lambda m, b: {"x": float("nan")},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted(tmp_path: Path, name: str) -> None:
    """Also what cannot be judged: noise would differ between a batch and its halves for any metric."""
    with running(Measured(ACCEPTED[name]), tmp_path) as run:
        assert list(run.evaluate()) == ["x"]


def test_only_the_first_evaluation_pays(tmp_path: Path) -> None:
    """Two calls more in the first one, and none in the second."""
    task = Measured(ACCEPTED["a mean"])
    with running(task, tmp_path) as run:
        run.evaluate()
        assert task.calls == 7
        run.evaluate()
    assert task.calls == 12


class Point(NamedTuple):
    x: Tensor
    y: Tensor | None


@dataclass
class Box:
    x: Tensor
    name: str | None


def test_batches_that_can_be_split() -> None:
    """Tensors by their first dimension, lists of plain values entry by entry, in any nesting."""
    x = torch.arange(6.0).reshape(3, 2)
    halves = split_in_halves({"a": (x, [x]), "words": ["p", "q", "r"], "b": Point(x, None), "c": Box(x, None)}, 3)
    assert halves is not None
    first, second = halves
    assert (first["words"], second["words"]) == (["p"], ["q", "r"])
    for one in (first["a"][0], first["a"][1][0], first["b"].x, first["c"].x):
        assert one.tolist() == [[0.0, 1.0]]
    assert second["b"].x.tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    "batch", [torch.zeros(2, 3), torch.tensor(1.0), {"x": torch.zeros(3), "longest": 7}, [torch.zeros(3), object()]]
)
def test_batches_that_cannot_be_split(batch: Any) -> None:
    """A packed row, a number that may be of the whole batch, an object of the user's: they are not checked."""
    assert split_in_halves(batch, 3) is None
    assert split_in_halves(torch.zeros(1, 3), 1) is None
