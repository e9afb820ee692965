"""Choices of a router: which tokens other experts are chosen for in two runs, and whether a near-tie explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

_NEAR: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
_NEAR_OF_COARSER: Final = 5e-2


def widest_tie(dtype: torch.dtype) -> float:
    """Return the largest gap of two experts' scores that rounding explains, relative to the larger one."""
    return _NEAR.get(dtype, _NEAR_OF_COARSER)


@final
@dataclass(frozen=True)
class RouterChoice:
    """Numbers of the experts that were chosen for each token, and their weights."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MovedToken:
    """A token for which two runs chose other experts."""

    token: int
    slot: int
    """Place, in the second run, of the expert that the first did not choose."""

    expert: int
    """Expert that the first run chose there instead."""

    gap: float
    """Difference of the weights of both experts, relative to the larger one."""


def moved_tokens(one: RouterChoice, other: RouterChoice) -> list[MovedToken]:
    """Return the tokens that have other experts in the second run: if the gap is rounding, the router's scores tie."""
    moved: list[MovedToken] = []
    differ = (one.experts.sort(1).values != other.experts.sort(1).values).any(1)
    for token in differ.nonzero().flatten().tolist():
        first, second = one.experts[token].tolist(), other.experts[token].tolist()
        gone = [slot for slot, expert in enumerate(first) if expert not in second]
        new = [slot for slot, expert in enumerate(second) if expert not in first]
        for slot_before, slot in zip(gone, new, strict=True):
            before, now = float(one.weights[token, slot_before]), float(other.weights[token, slot])
            gap = abs(before - now) / max(abs(before), abs(now), 1e-300)
            moved.append(MovedToken(token, slot, first[slot_before], gap))
    return moved
