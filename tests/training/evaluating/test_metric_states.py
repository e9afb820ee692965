"""States of Metric objects of several ranks, merged into those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import CatMetric, MaxMetric
from torchmetrics.regression import PearsonCorrCoef
from typing_extensions import override

from unipar.data.order import SampleKey
from unipar.errors import TaskError
from unipar.training.evaluating.metric_states import (
    RankStates,
    list_lengths,
    merge_into,
    restore_states,
    save_states,
    states_of,
)


def _ranks(make: Any, batches: list[tuple[int, Any]]) -> list[RankStates]:
    """Two ranks that take turns with batches, each updated by its own."""
    found: list[RankStates] = []
    for rank in range(2):
        metric, samples = make(), 0
        ends: dict[tuple[str, str], list[tuple[SampleKey, int]]] = {}
        for first, given in batches[rank::2]:
            metric.update(*given)
            samples += len(given[0])
            for state, length in list_lengths(metric).items():
                ends.setdefault(state, []).append(((0, first), length))
        found.append(RankStates(samples, states_of(metric), ends))
    return found


def _merged(make: Any, batches: list[tuple[int, Any]]) -> Any:
    metric = make()
    merge_into(metric, "m", _ranks(make, batches), torch.device("cpu"))
    return metric


X = torch.arange(7.0)
Y = torch.tensor([0.0, 2.0, 1.0, 3.0, 5.0, 4.0, 9.0])
BATCHES = [(i, (X[i : i + 2], Y[i : i + 2])) for i in range(0, 7, 2)]
"""Four batches of 2, 2, 2 and 1 samples."""


def test_lists_are_in_the_order_of_samples() -> None:
    """Though the first rank has samples 0, 1, 4 and 5."""
    merged = _merged(CatMetric, [(first, given[:1]) for first, given in BATCHES])
    assert merged.compute().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_librarys_own_reductions() -> None:
    """A maximum; and one whose states are stacked, for the metric itself to put together."""
    assert float(_merged(MaxMetric, [(first, given[:1]) for first, given in BATCHES]).compute()) == 6.0
    whole = PearsonCorrCoef()
    whole.update(X, Y)
    assert float(_merged(PearsonCorrCoef, BATCHES).compute()) == pytest.approx(float(whole.compute()), abs=1e-6)


class Averaged(Metric):
    """A state that ranks average."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="mean")

    @override
    def update(self, x: Tensor) -> None:
        self.total += x.sum()

    @override
    def compute(self) -> Tensor:
        return self.total


class Growing(Averaged):
    """A state of as many numbers as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(0), dist_reduce_fx="sum")

    @override
    def update(self, x: Tensor) -> None:
        self.total = torch.cat([self.total, x])


def test_a_mean_over_unequal_ranks_is_refused() -> None:
    """The library would count a rank of three samples as much as one of four; with as many it merges them."""
    with pytest.raises(TaskError) as e:
        _merged(Averaged, [(first, given[:1]) for first, given in BATCHES])
    assert str(e.value) == (
        "the state of metric m.total is merged by dist_reduce_fx='mean', in which each rank counts the same, and ranks "
        "have 4, 3 samples; keep a sum and a count, each with dist_reduce_fx='sum'"
    )
    assert float(_merged(Averaged, [(0, (X[:2],)), (2, (X[2:4],))]).compute()) == 3.0


def test_states_of_other_shapes_are_refused() -> None:
    """They cannot be added."""
    with pytest.raises(TaskError) as e:
        _merged(Growing, [(first, given[:1]) for first, given in BATCHES])
    assert str(e.value) == (
        "the state of metric m.total has other shapes on other ranks ((3,), (4,)): keep a list, or give it one shape"
    )


def test_what_does_not_count_is_undone() -> None:
    """States that an update changes in place, and lists to which it adds."""
    total, rows = Averaged(), CatMetric()
    total.update(X)
    rows.update(X)
    saved = save_states([total, rows])
    for _ in range(2):
        total.update(X)
        rows.update(X)
        restore_states(saved)
    assert float(total.compute()) == 21.0
    assert rows.compute().tolist() == X.tolist()
