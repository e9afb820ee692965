"""The guard's view of one update by an optimizer of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unipar.backend import Piece, Region
from unipar.training.watch.update_observer import UpdateObserver


def _observed(weight: Tensor, gradient: float, rate: float, *, undone: bool = False) -> UpdateObserver:
    """Return what is seen of a step of SGD, which may be undone before anybody looks."""
    p, before = nn.Parameter(weight), weight.clone()
    optimizer = torch.optim.SGD([p], lr=rate)

    def undo(*_: Any) -> None:
        p.data.copy_(before)

    if undone:
        optimizer.register_step_post_hook(undo)
    p.grad = torch.full_like(p, gradient)
    whole = Region(0, p.numel())
    with UpdateObserver([Piece("norm.weight", "weight", tuple(p.shape), whole, p.detach())]) as observer:
        optimizer.step()
    assert torch.equal(p, before)
    return observer


@pytest.mark.parametrize(
    ("dtype", "gradient", "rate"),
    [(torch.float32, 0.5, 1e-8), (torch.float32, 1e-9, 0.1), (torch.bfloat16, 0.5, 1e-3)],
)
def test_an_update_that_is_below_the_rounding(dtype: torch.dtype, gradient: float, rate: float) -> None:
    """A weight of 1 that stays 1 is no fault where the rate, or its gradient, is so small that it must."""
    observer = _observed(torch.ones(8, dtype=dtype), gradient, rate)
    assert observer.norms["norm.weight"] > 0
    assert observer.unchanged == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_without_effect(dtype: torch.dtype) -> None:
    """One element near 0, which the step should have changed, is enough."""
    weight = torch.tensor([1.0, 1e-5], dtype=dtype)
    (seen,) = _observed(weight, 0.5, 1e-3, undone=True).unchanged
    assert (seen.name, seen.rate, seen.dtype) == ("norm.weight", 1e-3, dtype)
