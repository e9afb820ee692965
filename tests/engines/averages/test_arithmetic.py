"""Arithmetic of averages: the same bits for a whole tensor and for its parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unipar.engines.averages import arithmetic
from unipar.engines.averages.arithmetic import exchange, move_towards


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_an_average_moves_by_a_share_of_the_distance() -> None:
    """In place; of 0.25, a quarter."""
    average, weight = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])
    move_towards([(average, weight)], 0.25)
    assert average.tolist() == [1.5, 1.0]
    assert weight.tolist() == [3.0, -2.0]


@pytest.mark.parametrize("ends", [(0, 1), (1, 12), (3, 131), (0, 403)])
def test_a_part_has_the_bits_of_the_whole(ends: tuple[int, int]) -> None:
    """Wherever a region begins and ends, and if its rows lie apart."""
    average, weight = _random(13, 31, seed=1), _random(13, 31, seed=2)
    part = average.flatten()[slice(*ends)].clone()
    column = average[:, 5:12].clone()
    move_towards([(part, weight.flatten()[slice(*ends)]), (column, weight[:, 5:12])], 1 - 0.999)
    move_towards([(average, weight)], 1 - 0.999)
    assert torch.equal(part, average.flatten()[slice(*ends)])
    assert torch.equal(column, average[:, 5:12])


@pytest.mark.parametrize("most", [1, 7, 64, 100])
def test_slices_have_the_bits_of_the_whole(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors with more elements than temporaries may have, and of many small ones."""
    shapes = [(9, 7), (64,), (), (0, 3), (3, 5)]
    averages = [_random(*shape, seed=i) for i, shape in enumerate(shapes)]
    weights = [_random(*shape, seed=i + 9) for i, shape in enumerate(shapes)]
    whole = [a + 0.1 * (w - a) for a, w in zip(averages, weights, strict=True)]
    monkeypatch.setattr(arithmetic, "MOST_ELEMENTS", most)
    move_towards(zip(averages, weights, strict=True), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(averages, whole, strict=True))
    before = [w.clone() for w in weights]
    exchange(zip(averages, weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(averages, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, whole, strict=True))
