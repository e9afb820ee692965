"""`UpdateGuard`: updates whose norm is not finite are left out, on the device where the optimizer reads it there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from unipar.config import Config
from unipar.engines import update_guard
from unipar.engines.learning_rate import BaseRates
from unipar.engines.update_guard import UpdateGuard

CPU = torch.device("cpu")


def config_of(**train: Any) -> Config:
    return Config.model_validate({"batch": {"total": 4}, "train": {"steps": 9, **train}})


def weights_after(norms: list[float], make: Callable[[list[nn.Parameter]], Optimizer], **train: Any) -> list[float]:
    """Return a weight after the update of each norm, whose gradient is always 1."""
    weight = nn.Parameter(torch.zeros(1))
    base = make([weight])
    rates = BaseRates(base)
    guard = UpdateGuard(base, [weight], rates, CPU, config_of(**train))
    weights: list[float] = []
    for norm in norms:
        weight.grad = torch.ones(1)
        rates.set(base, 1.0)
        if guard.leaves_out(torch.tensor(norm), None) is not True:
            base.step()
        weights.append(weight.item())
    return weights


def fused(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1.0, weight_decay=0.0, fused=True)


def plain(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_host_leaves_out_an_update(bad: float) -> None:
    """The update of a norm that is not finite; the next one is taken."""
    assert weights_after([1.0, bad, 1.0], plain) == [-1.0, -1.0, -2.0]


@pytest.fixture
def has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not read what is on the device."""
    monkeypatch.setattr(update_guard, "has_own_memory", bool)


@pytest.mark.usefixtures("has_memory")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_weights_stay_until_the_host_looks(bad: float) -> None:
    """With stop, no later update is taken on the device; with skip the next one is."""
    stopped = weights_after([1.0, 1.0, bad, 1.0, 1.0], fused)
    assert stopped == pytest.approx([-1.0, -2.0, -2.0, -2.0, -2.0])
    skipped = weights_after([1.0, 1.0, bad, 1.0, 1.0], fused, nonfinite="skip")
    assert skipped == pytest.approx([-1.0, -2.0, -2.0, -3.0, -4.0])


@pytest.mark.usefixtures("has_memory")
def test_an_optimizer_that_cannot_leave_out_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the answer in each step; with a fused one it does until the first update."""
    waits: list[int] = []
    item = Tensor.item

    def counted(t: Tensor) -> Any:
        if t.dtype == torch.bool:
            waits.append(1)
        return item(t)

    monkeypatch.setattr(Tensor, "item", counted)
    assert weights_after([1.0, math.inf, 1.0], plain) == [-1.0, -1.0, -2.0]
    assert len(waits) == 3
    weights_after([1.0, math.inf, 1.0], fused)
    assert len(waits) == 4


@pytest.mark.usefixtures("has_memory")
def test_a_first_update_that_is_left_out() -> None:
    """Nothing is kept of it: the optimizer has no state yet."""
    assert weights_after([math.inf, 1.0], fused) == pytest.approx([0.0, -1.0])
