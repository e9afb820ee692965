"""Record of a run, combined from its ranks: series by step, sketches and tensors by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unipar.backend import Region
from unipar.backend.engine import KIND_OF_AVERAGES

SketchVector = NDArray[np.float64]
"""Sketch of a tensor: a short vector whose length approximates the tensor's."""

StateKey = tuple[str, str]
"""Key of a tensor of the state: its parameter's name, and "weight", "average" or the optimizer's name for it."""


@dataclass(frozen=True)
class RankSeat:
    """Place of a rank in the mesh; ranks with the same share train on the same microbatches."""

    share: int
    """Seat along the axis of the data."""

    pipeline: int
    """Number of the stage, from 0."""

    context: int
    tensor: int
    leads: bool
    """Whether the rank speaks for all that have the same share."""


@dataclass(frozen=True)
class RankBatches:
    """Microbatches of one rank in one step, by fingerprint."""

    given: tuple[str, ...]
    """Fingerprints of the microbatches that the engine was given."""

    scales: tuple[float, ...]
    """Weight of each given microbatch, as a share of the global batch's weight."""

    used_fingerprints: tuple[str, ...]
    """Fingerprints of the batches on which the loss was computed."""

    @property
    def weighted_fingerprints(self) -> list[tuple[str, float]]:
        """Used fingerprints with their weights; each given one counts once, and one that was not given weighs NaN."""
        left = list(zip(self.given, self.scales, strict=True))
        weighted: list[tuple[str, float]] = []
        for mark in self.used_fingerprints:
            at = next((i for i, (name, _) in enumerate(left) if name == mark), None)
            weighted.append((mark, math.nan) if at is None else left.pop(at))
        return weighted

    @property
    def weight(self) -> float:
        """Sum of the weights of all microbatches used in the step."""
        return sum(weight for _, weight in self.weighted_fingerprints)


@dataclass(frozen=True)
class RunRecord:
    """Record of one run, combined from its ranks."""

    losses: list[float]
    norms: list[list[float]]
    """Norm of the gradient as each rank reports it, by step and rank."""

    rates: list[list[list[float]]]
    """Learning rate of each parameter group, by step and rank."""

    batches: list[list[RankBatches]]
    """Microbatches by step and share."""

    strays: list[list[int]]
    """Ranks that were given other microbatches than the leading rank of their share, by step."""

    prefixes: list[str]
    """Prefix of the parameter names of the part that was trained, by step; "" if the model has no parts."""

    states: list[dict[StateKey, SketchVector]]
    """Sketches of the state before the first step, then after each step."""

    state: dict[StateKey, Tensor]
    """Whole tensors of the state at the end."""

    traced: list[list[dict[str, Any]]]
    """Outputs and gradients of every module in the traced step, by rank; a module may run on some ranks only."""

    seats: list[RankSeat]
    """Seat of each rank."""

    copies: list[dict[StateKey, dict[int, SketchVector]]]
    """Sketches of each tensor of the state by rank that has the whole of it, by step; only where ranks share work."""

    held: list[dict[StateKey, dict[int, SketchVector]]]
    """Sketches of each region of a weight that several ranks hold, by name, region and rank: before the first step,
    then after each; only where ranks train on samples of their own."""

    masks: list[list[dict[int, list[str]]]]
    """Fingerprints of dropout's masks in their order, by step, rank and number of the microbatch."""

    buffers: dict[str, Tensor]
    """Whole floating-point buffers at the end; only of a replay, and where ranks share the work."""

    first_buffers: dict[str, Tensor]
    """The same before the first step."""

    shares: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Gradient of each microbatch and norm of each share, by step; only of a replay that keeps them apart."""

    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Parameter groups of the optimizer; only of a replay."""

    narrow: bool = False
    """Whether frozen weights, and so what is computed with them, have fewer digits than the trained ones."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.losses)

    @property
    def moments(self) -> list[str]:
        """Names of the optimizer's states, without step counts."""
        return sorted({kind for _, kind in self.state} - {"weight", "step", KIND_OF_AVERAGES})


def norm_of(vector: SketchVector) -> float:
    """Return the Euclidean norm of a sketch."""
    return float(np.linalg.norm(vector))


def combine_ranks(ranks: list[dict[str, Any]]) -> RunRecord:
    """Return the record of a run from those of its ranks: losses and sketches are added, ranges of tensors joined."""
    steps = [list(step) for step in zip(*(rank["steps"] for rank in ranks), strict=True)]
    seats = [_rank_seat(rank["seat"]) for rank in ranks]
    leaders = {seat.share: rank for rank, seat in enumerate(seats) if seat.leads}
    state = _join_pieces([piece for rank in ranks for piece in rank["pieces"]])
    return RunRecord(
        losses=[sum(rank["loss"] for rank in step) for step in steps],
        norms=[[rank["norm"] for rank in step] for step in steps],
        rates=[[rank["rates"] for rank in step] for step in steps],
        batches=[[_rank_batches(step[leaders[share]]) for share in sorted(leaders)] for step in steps],
        strays=[
            [r for r, seat in enumerate(seats) if step[r]["given"] != step[leaders[seat.share]]["given"]]
            for step in steps
        ],
        prefixes=[step[0]["prefix"] for step in steps],
        states=[_add_sketches(list(states)) for states in zip(*(rank["states"] for rank in ranks), strict=True)],
        state=state,
        traced=[rank["traced"] for rank in ranks],
        seats=seats,
        copies=[_whole_copies(list(copies), state) for copies in zip(*(rank["copies"] for rank in ranks), strict=True)],
        held=[_shared_regions(list(held)) for held in zip(*(rank["held"] for rank in ranks), strict=True)],
        masks=[[rank["masks"] for rank in step] for step in steps],
        buffers={name: buffer for rank in ranks for name, buffer in rank["buffers"].items()},
        first_buffers={name: buffer for rank in ranks for name, buffer in rank["first_buffers"].items()},
        shares=ranks[0]["shares"],
        groups=ranks[0]["groups"],
        narrow=ranks[0]["narrow"],
    )


def join_halves(before: RunRecord, replay: RunRecord, after: RunRecord) -> RunRecord:
    """Return the record of a run that went on from a checkpoint, with the steps before it taken from one process.

    `replay` splits its batches into as many shares as the run that went on.
    """
    first = before.steps - after.steps
    return replace(
        after,
        losses=before.losses[:first] + after.losses,
        norms=before.norms[:first] + after.norms,
        rates=before.rates[:first] + after.rates,
        batches=replay.batches[:first] + after.batches,
        strays=[list[int]() for _ in range(first)] + after.strays,
        prefixes=before.prefixes[:first] + after.prefixes,
        states=before.states[:first] + after.states,
        copies=[{} for _ in range(first)] + after.copies if after.copies else [],
        held=[{} for _ in range(first)] + after.held if after.held else [],
        masks=[[] for _ in range(first)] + after.masks,
    )


def _rank_seat(seat: dict[str, Any]) -> RankSeat:
    return RankSeat(seat["data"], seat["pipeline"], seat["context"], seat["tensor"], leads=seat["leads"])


def _rank_batches(step: dict[str, Any]) -> RankBatches:
    marks = tuple(mark for mark, _ in step["given"])
    return RankBatches(marks, tuple(scale for _, scale in step["given"]), tuple(step["seen"]))


def _add_sketches(states: list[dict[str, Tensor]]) -> dict[StateKey, SketchVector]:
    total: dict[StateKey, SketchVector] = {}
    for state in states:
        for text, sketch in state.items():
            name, _, kind = text.rpartition("|")
            mine: SketchVector = sketch.numpy()
            total[name, kind] = total[name, kind] + mine if (name, kind) in total else mine
    return total


def _whole_copies(
    ranks: list[dict[str, tuple[int, Tensor]]], state: dict[StateKey, Tensor]
) -> dict[StateKey, dict[int, SketchVector]]:
    copies: dict[StateKey, dict[int, SketchVector]] = {}
    for rank, kept in enumerate(ranks):
        for text, (size, sketch) in kept.items():
            name, _, kind = text.rpartition("|")
            if (name, kind) in state and state[name, kind].numel() == size:
                copies.setdefault((name, kind), {})[rank] = sketch.numpy()
    return copies


def _shared_regions(ranks: list[dict[str, Tensor]]) -> dict[StateKey, dict[int, SketchVector]]:
    """Return the regions that more than one rank holds."""
    regions: dict[StateKey, dict[int, SketchVector]] = {}
    for rank, held in enumerate(ranks):
        for text, sketch in held.items():
            name, _, where = text.partition("|")
            regions.setdefault((name, where), {})[rank] = sketch.numpy()
    return {key: copies for key, copies in regions.items() if len(copies) > 1}


def _join_pieces(pieces: list[Any]) -> dict[StateKey, Tensor]:
    """Return whole tensors from the ranks' regions; a region that no rank holds is NaN, so that it equals nothing."""
    full: dict[StateKey, Tensor] = {}
    for name, kind, shape, numbers, tensor in pieces:
        if (name, kind) not in full:
            full[name, kind] = torch.full((int(torch.Size(shape).numel()),), math.nan, dtype=tensor.dtype)
        where = Region(*numbers)
        where.of(full[name, kind]).copy_(tensor.view(where.runs, where.length))
    return full


def equals_bitwise(one: RunRecord, other: RunRecord) -> bool:
    """Return whether all weights and moments at the end are bit-for-bit equal; step counts differ between libraries."""
    mine = {k: t for k, t in one.state.items() if k[1] != "step"}
    theirs = {k: t for k, t in other.state.items() if k[1] != "step"}
    return mine.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in mine.items())


def tensor_distance(one: Tensor, other: Tensor) -> float:
    """Return the Euclidean length of the difference of two tensors."""
    return float((one.double() - other.double()).norm())
