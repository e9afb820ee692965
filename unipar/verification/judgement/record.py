"""What a run was, its ranks put together: series by step, sketches and tensors by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SketchVector = NDArray[np.float64]
StateKey = tuple[str, str]
"""A tensor of the state: its parameter's name, and weight or the optimizer's own word."""


@dataclass(frozen=True)
class RankBatches:
    """The microbatches of one rank in one step, by fingerprint."""

    given: tuple[str, ...]
    scales: tuple[float, ...]
    """Each one's weight over the global batch's."""

    used_fingerprints: tuple[str, ...]
    """What the loss was computed on."""

    @property
    def weighted_fingerprints(self) -> list[tuple[str, float]]:
        """What was used, with its weight; each given one counts once, and what nobody gave weighs no number."""
        left = list(zip(self.given, self.scales, strict=True))
        found: list[tuple[str, float]] = []
        for mark in self.used_fingerprints:
            at = next((i for i, (name, _) in enumerate(left) if name == mark), None)
            found.append((mark, math.nan) if at is None else left.pop(at))
        return found

    @property
    def weight(self) -> float:
        """Of all that was used."""
        return sum(weight for _, weight in self.weighted_fingerprints)


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    losses: list[float]
    norms: list[list[float]]
    """By step, each rank's word for the one norm."""

    rates: list[list[list[float]]]
    """By step and rank, each group's."""

    batches: list[list[RankBatches]]
    """By step and rank."""

    prefixes: list[str]
    """By step, what the names of the part that was trained begin with; nothing, where the model is one."""

    states: list[dict[StateKey, SketchVector]]
    """Sketches: before the first step, then after each."""

    state: dict[StateKey, Tensor]
    """At the end, whole."""

    traced: list[list[dict[str, Any]]]
    """By rank, the modules of the step that was recorded."""

    shares: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def moments(self) -> list[str]:
        return sorted({kind for _, kind in self.state} - {"weight", "step"})


def combine_ranks(ranks: list[dict[str, Any]]) -> RunRecord:
    """Shares are added, ranges joined."""
    steps = [list(step) for step in zip(*(rank["steps"] for rank in ranks), strict=True)]
    return RunRecord(
        losses=[sum(rank["loss"] for rank in step) for step in steps],
        norms=[[rank["norm"] for rank in step] for step in steps],
        rates=[[rank["rates"] for rank in step] for step in steps],
        batches=[[_rank_batches(rank) for rank in step] for step in steps],
        prefixes=[step[0]["prefix"] for step in steps],
        states=[_add_sketches(list(states)) for states in zip(*(rank["states"] for rank in ranks), strict=True)],
        state=_join_pieces([piece for rank in ranks for piece in rank["pieces"]]),
        traced=[rank["traced"] for rank in ranks],
        shares=ranks[0]["shares"],
        groups=ranks[0]["groups"],
    )


def _rank_batches(step: dict[str, Any]) -> RankBatches:
    given = tuple(mark for mark, _ in step["given"])
    return RankBatches(given, tuple(scale for _, scale in step["given"]), tuple(step["seen"]))


def _add_sketches(states: list[dict[str, Tensor]]) -> dict[StateKey, SketchVector]:
    whole: dict[StateKey, SketchVector] = {}
    for state in states:
        for text, sketch in state.items():
            name, _, kind = text.rpartition("|")
            mine: SketchVector = sketch.numpy()
            whole[name, kind] = whole[name, kind] + mine if (name, kind) in whole else mine
    return whole


def _join_pieces(pieces: list[Any]) -> dict[StateKey, Tensor]:
    """A range that nobody holds is NaN, so that it equals nothing."""
    whole: dict[StateKey, Tensor] = {}
    for name, kind, shape, (start, stop), tensor in pieces:
        if (name, kind) not in whole:
            whole[name, kind] = torch.full((int(torch.Size(shape).numel()),), math.nan, dtype=tensor.dtype)
        whole[name, kind][start:stop] = tensor
    return whole


def equals_bitwise(one: RunRecord, other: RunRecord) -> bool:
    """Every weight and moment at the end; step counts are kept in different ways."""
    mine = {k: t for k, t in one.state.items() if k[1] != "step"}
    theirs = {k: t for k, t in other.state.items() if k[1] != "step"}
    return mine.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in mine.items())


def tensor_distance(one: Tensor, other: Tensor) -> float:
    """The length of the difference."""
    return float((one.double() - other.double()).norm())
