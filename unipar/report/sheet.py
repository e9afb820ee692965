"""compare.csv: a row a cell, in bytes and seconds, for those who compute with it."""

from __future__ import annotations

import csv
import io
from statistics import median
from typing import Final

from unipar.memory.account import CATEGORIES
from unipar.report.comparison import Comparison, Row
from unipar.report.cuda import Measured, there
from unipar.report.memory import fullest, hosts, resident

HEAD: Final = (
    "cell",
    "outcome",
    "digits",
    "within",
    "median_step_s",
    "samples_per_s",
    "allocated",
    "resident",
    "predicted_on_cuda",
    "measured_on_cuda",
    "reserved",
    "host",
    *CATEGORIES,
)


def sheet(found: Comparison) -> str:
    """What is not known is empty; `digits` of losses that are equal to the bit is `all`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(
        [row.cell, row.outcome, *_agrees(found, row), *_timed(found, row), *_held(found, row)] for row in found.rows
    )
    return text.getvalue()


def _agrees(found: Comparison, row: Row) -> list[str]:
    told = found.agreement(row)
    if told is None:
        return ["", ""]
    return ["all" if told.digits is None else str(told.digits), "yes" if told.within else "no"]


def _timed(found: Comparison, row: Row) -> list[str]:
    if not row.timed or row.outcome != "ran":
        return ["", ""]
    middle = median(row.timed)
    return [f"{middle:.6g}", f"{found.samples / middle:.6g}"]


def _held(found: Comparison, row: Row) -> list[str]:
    """Of the largest rank; its categories add up to what is allocated. Of a cell that failed not all is known."""
    if not row.memory or row.outcome in ("failed", "unlike"):
        return [""] * (6 + len(CATEGORIES))
    account = fullest(row.memory)
    took = there(account, found.world(row))
    on_cuda = (None, took.total) if isinstance(took, Measured) else (took.total, None)
    sizes = [account.peak.peak, resident(row.memory), *on_cuda, account.reserved, hosts(row.memory)]
    return ["" if s is None else str(s) for s in [*sizes, *(account.peak.held.get(c, 0) for c in CATEGORIES)]]
