"""First modules in which two runs of a step differ, in the forward and in the backward pass, and differing losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from unipar.config.sections.strategy import Axes
from unipar.verification.judgement.record import RunRecord

ROUNDING_FACTOR = 16.0
"""Factor on the rounding of one process that a module's sketch may differ by."""

MIN_RELATIVE_DIFFERENCE = 1e-5
"""Smallest relative difference that counts: within one module, too, rounding is amplified."""

RowKey = tuple[str, str, int]
"""Direction, place in the model and number of the microbatch, which identify a row of a trace."""


@dataclass(frozen=True)
class ModuleDifference:
    """First module in which a strategy's numbers differ, in one direction."""

    way: str
    """Direction: forward or backward."""

    module: str
    rank: int
    micro: int
    off: float
    """Relative difference; NaN if the module was not recorded."""


@dataclass(frozen=True)
class LossDifference:
    """Microbatch for which the loss function returned another value than in one process."""

    rank: int
    micro: int
    value: float
    wanted: float


def find_loss_differences(run: RunRecord, own: RunRecord, exact: RunRecord, shares: int) -> list[LossDifference]:
    """Return the microbatches whose losses differ by more than rounding; `own` and `exact` as for modules."""
    differences: list[LossDifference] = []
    wanted, true = _loss_by_number(own.traced[0]), _loss_by_number(exact.traced[0])
    weights = own.batches[-1][0].scales
    for rank, rows in enumerate(run.traced):
        for number, value in _loss_by_number(rows).items():
            if number not in wanted or not weights[number]:
                continue
            right = wanted[number]
            rounding = abs(right - true.get(number, right))
            if not abs(value - right) <= max(ROUNDING_FACTOR * rounding, MIN_RELATIVE_DIFFERENCE * abs(right)):
                differences.append(LossDifference(rank, number // shares, value, right))
    return sorted(differences, key=lambda difference: (difference.micro, difference.rank))


def loss_rounding(run: RunRecord, own: RunRecord, exact: RunRecord) -> tuple[float, float]:
    """Return the largest relative distances of a microbatch's loss from the exact one: of the run, and of one process.

    `own` and `exact` as for modules.
    """
    wanted, true = _loss_by_number(own.traced[0]), _loss_by_number(exact.traced[0])
    sizes = {number: abs(value) for number, value in true.items() if number in wanted and value}
    mine = [
        abs(value - true[number]) / sizes[number]
        for rows in run.traced
        for number, value in _loss_by_number(rows).items()
        if number in sizes
    ]
    return max(mine, default=math.inf), max((abs(wanted[n] - true[n]) / size for n, size in sizes.items()), default=0.0)


def count_loss_ranks(run: RunRecord) -> int:
    """Return the number of ranks that compute losses: in a pipeline, those of the last stage."""
    return sum(bool(_loss_by_number(rows)) for rows in run.traced)


def _loss_by_number(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["number"]: float(row["sketch"]) for row in rows if row["way"] == "loss"}


def find_module_differences(
    run: RunRecord, own: RunRecord, exact: RunRecord, shares: int, axes: Axes
) -> dict[str, ModuleDifference]:
    """Return the first difference by direction. `own` and `exact` are replays, in the run's precision and in fp64.

    Ranks along further axes of a mesh hold parts of some outputs, whose shapes differ, and stages of a pipeline do not
    run all modules: what no rank has whole is not compared.
    """
    differences: dict[str, ModuleDifference] = {}
    wanted, true = _index_rows(own.traced[0]), _index_rows(exact.traced[0])
    mine = [_index_rows(rows) for rows in run.traced]
    scale = _backward_scale(mine, wanted, shares, axes)
    weights = own.batches[-1][0].scales
    for key, row in wanted.items():
        way, _, number = key
        if way in ("loss", "rows") or way in differences:
            continue
        if not weights[number]:  # a microbatch of weight 0 may hold anything
            continue
        micro, share = divmod(number, shares)
        factor = scale if way == "backward" else 1.0
        rounding = float((row["sketch"] - true[key]["sketch"]).norm()) if key in true else 0.0
        size = float(row["sketch"].norm())
        allowed = max(ROUNDING_FACTOR * rounding, MIN_RELATIVE_DIFFERENCE * size)
        off_of_rank = dict(_differences(run, mine, key, row, share, factor))
        if not off_of_rank and not axes.split:
            first = next((r for r, seat in enumerate(run.seats) if seat.share == share), 0)
            differences[way] = ModuleDifference(way, row["module"], first, micro, float("nan"))
        for rank, off in off_of_rank.items():
            if not off <= allowed:
                relative = off / size if size else float("inf")
                differences[way] = ModuleDifference(way, row["module"], rank, micro, relative)
                break
    return differences


def has_right_gradient(run: RunRecord, own: RunRecord, place: ModuleDifference, shares: int, axes: Axes) -> bool:
    """Return whether, in the microbatch and on the rank of `place`, the gradient of any module's output is right."""
    wanted, mine = _index_rows(own.traced[0]), [_index_rows(rows) for rows in run.traced]
    scale = _backward_scale(mine, wanted, shares, axes)
    share = run.seats[place.rank].share
    for key, row in wanted.items():
        size = float(row["sketch"].norm())
        if key[0] == "backward" and key[2] == place.micro * shares + share and size > 0:
            off = dict(_differences(run, mine, key, row, share, scale)).get(place.rank)
            if off is not None and off <= ROUNDING_FACTOR * MIN_RELATIVE_DIFFERENCE * size:
                return True
    return False


def _differences(
    run: RunRecord,
    mine: list[dict[RowKey, dict[str, Any]]],
    key: RowKey,
    row: dict[str, Any],
    share: int,
    factor: float,
) -> Iterator[tuple[int, float]]:
    """Yield the ranks that have computed a row of one process, each with the distance of its sketch.

    Of the stages of a pipeline the nearest one counts, because the others pass something else through their modules.
    """
    nearest: dict[tuple[int, int], tuple[float, int]] = {}
    for rank, (seat, rows) in enumerate(zip(run.seats, mine, strict=True)):
        other = rows.get(key)
        if seat.share == share and other is not None and other["shape"] == row["shape"]:
            off = float((other["sketch"] / factor - row["sketch"]).norm())
            place = seat.context, seat.tensor
            if place not in nearest or not nearest[place][0] <= off:
                nearest[place] = off, rank
    for off, rank in nearest.values():
        yield rank, off


def _index_rows(rows: list[dict[str, Any]]) -> dict[RowKey, dict[str, Any]]:
    """Return the rows by direction, place and microbatch, in the order of events; of equal keys the last row counts."""
    return {(row["way"], row["at"], row["number"]): row for row in rows}


def _backward_scale(mine: list[dict[RowKey, Any]], wanted: dict[RowKey, Any], shares: int, axes: Axes) -> float:
    """Return the factor of backward gradients: not all libraries multiply the loss by the number of shares.

    Ranks that split a sequence may scale it by their number as well.
    """
    known = [a / b for a in (1.0, 1.0 / shares) for b in (1, axes.context)]
    for key, row in wanted.items():
        if key[0] != "backward" or not float(torch.linalg.vector_norm(row["sketch"])) > 0:
            continue
        for rows in mine:
            other = rows.get(key)
            if other is not None and other["shape"] == row["shape"]:
                ratio = float(other["sketch"].norm() / row["sketch"].norm())
                return min(known, key=lambda factor: abs(ratio - factor))
    return 1.0
