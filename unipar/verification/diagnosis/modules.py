"""Where two runs of one step part: the first module on the way forward, and on the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from unipar.verification.judgement.record import RunRecord

ROUNDING_FACTOR = 16.0
"""How many times the rounding of one process a module's sketch may be off."""

MIN_RELATIVE_DIFFERENCE = 1e-5
"""The least that counts as off, in proportion: rounding is amplified within one module too."""


@dataclass(frozen=True)
class ModuleDifference:
    """The first place where a cell's numbers are others."""

    way: str
    """forward or backward."""

    module: str
    rank: int
    micro: int
    off: float
    """In proportion."""


def find_module_differences(
    run: RunRecord, own: RunRecord, exact: RunRecord, ranks: int
) -> dict[str, ModuleDifference]:
    """By way, if there is one. `own` is a replay in the run's precision, `exact` one in fp64, of the same step."""
    found: dict[str, ModuleDifference] = {}
    wanted, true = _index_rows(own.traced[0]), _index_rows(exact.traced[0])
    mine = [_index_rows(rows) for rows in run.traced]
    scale = _backward_scale(mine, wanted, ranks)
    counts = own.batches[-1][0].scales
    for (way, at, call), row in wanted.items():
        if way in found or not counts[call]:  # one of weight 0 may be any
            continue
        micro, rank = divmod(call, ranks)
        other = mine[rank].get((way, at, micro)) if rank < len(mine) else None
        if other is None:
            found[way] = ModuleDifference(way, row["module"], rank, micro, float("nan"))
            continue
        factor = scale if way == "backward" else 1.0
        size = float(row["sketch"].norm())
        off = float((other["sketch"] / factor - row["sketch"]).norm())
        rounding = float((row["sketch"] - true[way, at, call]["sketch"]).norm()) if (way, at, call) in true else 0.0
        if not off <= max(ROUNDING_FACTOR * rounding, MIN_RELATIVE_DIFFERENCE * size):
            found[way] = ModuleDifference(way, row["module"], rank, micro, off / size if size else float("inf"))
    return found


def _index_rows(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """In the order in which things happened; the last word of each place counts."""
    return {(row["way"], row["at"], row["call"]): row for row in rows}


def _backward_scale(
    mine: list[dict[tuple[str, str, int], Any]], wanted: dict[tuple[str, str, int], Any], ranks: int
) -> float:
    """Libraries differ in whether the loss is multiplied by the number of ranks before it goes backward."""
    for (way, at, call), row in wanted.items():
        micro, rank = divmod(call, ranks)
        other = mine[rank].get((way, at, micro)) if way == "backward" and rank < len(mine) else None
        if other is not None and float(torch.linalg.vector_norm(row["sketch"])) > 0:
            ratio = float(other["sketch"].norm() / row["sketch"].norm())
            return min((1.0, 1.0 / ranks), key=lambda known: abs(ratio - known))
    return 1.0
