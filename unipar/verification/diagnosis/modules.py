"""First modules in which two runs of a step differ, in the forward and in the backward pass, and differing losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from unipar.verification.judgement.record import RunRecord

ROUNDING_FACTOR = 16.0
"""Factor on the rounding of one process that a module's sketch may differ by."""

MIN_RELATIVE_DIFFERENCE = 1e-5
"""Smallest relative difference that counts: within one module, too, rounding is amplified."""


@dataclass(frozen=True)
class ModuleDifference:
    """First module in which a cell's numbers differ, in one direction."""

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


def find_loss_differences(run: RunRecord, own: RunRecord, exact: RunRecord, ranks: int) -> list[LossDifference]:
    """Return the microbatches whose losses differ by more than rounding; `own` and `exact` as for modules."""
    differences: list[LossDifference] = []
    wanted, true = _loss_by_call(own.traced[0]), _loss_by_call(exact.traced[0])
    mine = [_loss_by_call(rows) for rows in run.traced]
    weights = own.batches[-1][0].scales
    for call, right in wanted.items():
        micro, rank = divmod(call, ranks)
        if not weights[call] or rank >= len(mine) or micro not in mine[rank]:
            continue
        value = mine[rank][micro]
        rounding = abs(right - true.get(call, right))
        if not abs(value - right) <= max(ROUNDING_FACTOR * rounding, MIN_RELATIVE_DIFFERENCE * abs(right)):
            differences.append(LossDifference(rank, micro, value, right))
    return differences


def _loss_by_call(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["call"]: float(row["sketch"]) for row in rows if row["way"] == "loss"}


def find_module_differences(
    run: RunRecord, own: RunRecord, exact: RunRecord, ranks: int
) -> dict[str, ModuleDifference]:
    """Return the first difference by direction. `own` and `exact` are replays, in the run's precision and in fp64."""
    differences: dict[str, ModuleDifference] = {}
    wanted, true = _index_rows(own.traced[0]), _index_rows(exact.traced[0])
    mine = [_index_rows(rows) for rows in run.traced]
    scale = _backward_scale(mine, wanted, ranks)
    counts = own.batches[-1][0].scales
    for (way, at, call), row in wanted.items():
        if way == "loss" or way in differences or not counts[call]:  # a microbatch of weight 0 may hold anything
            continue
        micro, rank = divmod(call, ranks)
        other = mine[rank].get((way, at, micro)) if rank < len(mine) else None
        if other is None:
            differences[way] = ModuleDifference(way, row["module"], rank, micro, float("nan"))
            continue
        factor = scale if way == "backward" else 1.0
        size = float(row["sketch"].norm())
        off = float((other["sketch"] / factor - row["sketch"]).norm())
        rounding = float((row["sketch"] - true[way, at, call]["sketch"]).norm()) if (way, at, call) in true else 0.0
        if not off <= max(ROUNDING_FACTOR * rounding, MIN_RELATIVE_DIFFERENCE * size):
            differences[way] = ModuleDifference(way, row["module"], rank, micro, off / size if size else float("inf"))
    return differences


def _index_rows(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the rows by direction, place and call, in the order of events; of equal keys the last row counts."""
    return {(row["way"], row["at"], row["call"]): row for row in rows}


def _backward_scale(
    mine: list[dict[tuple[str, str, int], Any]], wanted: dict[tuple[str, str, int], Any], ranks: int
) -> float:
    """Return the factor of backward gradients, 1 or 1 / ranks: not all libraries multiply the loss by the ranks."""
    for (way, at, call), row in wanted.items():
        micro, rank = divmod(call, ranks)
        other = mine[rank].get((way, at, micro)) if way == "backward" and rank < len(mine) else None
        if other is not None and float(torch.linalg.vector_norm(row["sketch"])) > 0:
            ratio = float(other["sketch"].norm() / row["sketch"].norm())
            return min((1.0, 1.0 / ranks), key=lambda known: abs(ratio - known))
    return 1.0
