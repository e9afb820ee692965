"""compare.csv: a row a cell; scale.csv, worlds.csv: a row a world. In bytes and seconds, to compute with."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from unipar.memory.account import CATEGORIES
from unipar.memory.cuda_total import Measured, there
from unipar.results.agreement import Agreement
from unipar.results.comparison import Comparison
from unipar.results.memory_tables import fullest, hosts, resident
from unipar.results.row import Row
from unipar.results.scaling import Scaling

AGREES: Final = ("digits", "within")
TIMED: Final = ("median_step_s", "samples_per_s")
HELD: Final = (
    "allocated",
    "resident",
    "predicted_on_cuda",
    "measured_on_cuda",
    "reserved",
    "host",
    *CATEGORIES,
)
HEAD: Final = ("cell", "outcome", *AGREES, *TIMED, *HELD)
WORLD: Final = ("ranks", "scaling", "samples", "micro", "accumulate")
GAINS: Final = ("speed_up", "efficiency")


def sheet(found: Comparison) -> str:
    """What is not known is empty; `digits` of losses that are equal to the bit is `all`."""
    return _written(
        HEAD,
        (
            [row.cell, row.outcome, *_said(found.agreement(row)), *_timed(found, row), *_held(row, found.world(row))]
            for row in found.rows
        ),
    )


def of_worlds(found: Scaling) -> str:
    """The same of cells in worlds of several sizes: a row a world."""
    return _written(("cell", *WORLD, "outcome", *AGREES, *TIMED, *GAINS, *HELD), _worlds(found))


def _worlds(found: Scaling) -> Iterator[list[object]]:
    for world in found.worlds:
        row, rate = found.row(world), found.rate(world)
        step = [None, None] if rate is None else [world.samples / rate, rate]
        gains = [*step, found.faster(world), found.efficiency(world)]
        cut = [world.ranks, world.shown[-1], world.samples, world.micro, world.accumulate]
        agrees = _said(found.agreement(world))
        figures = ["" if v is None else f"{v:.6g}" for v in gains]
        yield [world.cell, *cut, row.outcome, *agrees, *figures, *_held(row, world.ranks)]


def _written(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def _said(told: Agreement | None) -> list[str]:
    if told is None:
        return ["", ""]
    return ["all" if told.digits is None else str(told.digits), "yes" if told.within else "no"]


def _timed(found: Comparison, row: Row) -> list[str]:
    if not row.timed or row.outcome != "ran":
        return ["", ""]
    middle = median(row.timed)
    return [f"{middle:.6g}", f"{found.samples / middle:.6g}"]


def _held(row: Row, ranks: int) -> list[str]:
    """Of the largest rank; its categories add up to what is allocated. Of a cell that failed not all is known."""
    if not row.memory or row.outcome in ("failed", "unlike"):
        return [""] * len(HELD)
    account = fullest(row.memory)
    took = there(account, ranks)
    on_cuda = (None, took.total) if isinstance(took, Measured) else (took.total, None)
    sizes = [account.peak.peak, resident(row.memory), *on_cuda, account.reserved, hosts(row.memory)]
    return ["" if s is None else str(s) for s in [*sizes, *(account.peak.held.get(c, 0) for c in CATEGORIES)]]
