"""Arithmetic of averages: each element is rounded alike, whichever region of a tensor a rank keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from unipar.prediction.terms import AVERAGED_AT_ONCE

Pair = tuple[Tensor, Tensor]
"""An average and its weight, of one shape."""

MOST_ELEMENTS: Final = AVERAGED_AT_ONCE
"""Most elements of temporaries at one time."""


@torch.no_grad()
def move_towards(pairs: Iterable[Pair], share: float | Tensor) -> None:
    """Move each average towards its weight by this share of the distance.

    Three operations, each of which rounds once: what a fused one, such as lerp, rounds depends on how it was compiled.
    """
    for averages, weights in _bundles(pairs):
        differences = [weight - average for average, weight in zip(averages, weights, strict=True)]
        torch._foreach_mul_(differences, share)  # pyright: ignore[reportPrivateUsage]
        torch._foreach_add_(averages, differences)  # pyright: ignore[reportPrivateUsage]


@torch.no_grad()
def exchange(pairs: Iterable[Pair]) -> None:
    """Give each of two tensors of one dtype the other's values."""
    for pair in pairs:
        for one, other in _slices(pair):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def _bundles(pairs: Iterable[Pair]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield lists of averages and their weights, of no more elements together than `MOST_ELEMENTS`."""
    averages, weights, elements = list[Tensor](), list[Tensor](), 0
    for pair in pairs:
        for average, weight in _slices(pair):
            if elements and elements + average.numel() > MOST_ELEMENTS:
                yield averages, weights
                averages, weights, elements = [], [], 0
            averages.append(average)
            weights.append(weight)
            elements += average.numel()
    if averages:
        yield averages, weights


def _slices(pair: Pair) -> Iterator[Pair]:
    """Yield both tensors of a pair, or slices along their first dimension if they have more than `MOST_ELEMENTS`."""
    one, other = pair
    if one.numel() <= MOST_ELEMENTS:
        yield pair
        return
    rows = max(1, MOST_ELEMENTS // (one.numel() // len(one)))
    yield from zip(one.split(rows), other.split(rows), strict=True)
