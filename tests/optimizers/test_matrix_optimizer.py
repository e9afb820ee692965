"""Shapes that `direction` of an optimizer by whole matrices may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.errors import TaskError
from unipar.optimizers.matrix_optimizer import MatrixOptimizer


class _Returning(MatrixOptimizer):
    def __init__(self, params: Any, direction: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self._direction = direction

    @override
    def direction(self, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        return self._direction(gradient)


def _step(direction: Callable[[Tensor], Any]) -> Tensor:
    matrix = nn.Parameter(torch.ones(2, 3))
    optimizer = _Returning([matrix], direction)
    matrix.grad = torch.arange(6.0).view(2, 3)
    optimizer.step()
    return matrix.detach()


def test_a_direction_that_is_not_contiguous() -> None:
    """Elements go to their places, however they lie in memory."""
    assert torch.equal(_step(lambda g: g.T.contiguous().T), 1 - 0.1 * torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("direction", "given"),
    [
        (torch.ones(3, 2), "a tensor of shape (3, 2)"),
        (torch.ones(4, 3), "a tensor of shape (4, 3)"),
        (torch.ones(6), "a tensor of shape (6,)"),
        (None, "None"),
    ],
)
def test_a_direction_of_another_shape(direction: Tensor | None, given: str) -> None:
    """Another shape is refused, also where it has enough elements."""
    with pytest.raises(TaskError) as e:
        _step(lambda g: direction)
    assert str(e.value) == (
        f"direction() returned {given} for a matrix of shape (2, 3): return a tensor of its shape, which, times the "
        "rate, is subtracted from it"
    )
