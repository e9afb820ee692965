"""`Comparison`: all cells, verdict, table."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any, Self

from typing_extensions import override

from unipar.config import Precision
from unipar.results.agreement import Agreement, loss_tolerance, measure_agreement
from unipar.results.memory_tables import (
    RSS,
    describe_memory_columns,
    describe_peak_ranges,
    format_memory_tables,
    largest_peak_bytes,
)
from unipar.results.row import OUTCOME_PREFIXES, CellResult, cell_result_from_json, cell_result_to_json, format_spread
from unipar.results.same_training import TrainingMarks, describe_training_difference
from unipar.utils.table import Remark, format_table_rows, table_remarks
from unipar.utils.text import count_of, format_size


@dataclass(frozen=True, kw_only=True)
class TurnResults(ABC):
    """What came of worlds that took turns, a row for each."""

    name: str
    out: str
    precision: Precision
    warmup: int
    """Steps before the timed ones."""

    rows: list[CellResult]
    note: str = ""
    unwatched: str = ""
    """Why no memory is shown."""

    interrupted: bool = False
    unkept: str = ""
    """Why its folder has not all of this."""

    @abstractmethod
    def training_difference(self, row: CellResult) -> str:
        """Why this one did not train what the others do, as far as was seen; empty: it did."""

    @property
    @abstractmethod
    def ran_and_agrees(self) -> bool:
        """Whether any ran that was to be found out about, and none disagrees."""

    @property
    def code(self) -> int:
        """What the command line exits with: refusals are an answer, failures and disagreement are not."""
        if self.interrupted:
            return 130
        if self.unkept:
            return 1
        return 0 if self.ran_and_agrees and not {"failed", "unlike"} & {row.outcome for row in self.rows} else 1

    @override
    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 80) -> str:
        made, beside = self.blocks(width), self.extra_tables(width)
        head = " ".join([made[0][0], *beside]).split()
        shown = [r.text for r in self.column_remarks() if not r.column or r.column in head]
        said = [line for text in shown for line in textwrap.wrap(text, width, subsequent_indent="  ")]
        return "\n".join(["\n".join(lines) for lines in made] + [*beside, "", *said])

    @abstractmethod
    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each row."""

    def extra_tables(self, width: int) -> list[str]:
        """Lines of further tables."""
        return []

    @abstractmethod
    def column_remarks(self) -> list[Remark]:
        """Return what the table means and what is wrong, each with the column that it is on."""

    def remarks(self) -> list[str]:
        """What the table means, and what is wrong."""
        return [remark.text for remark in self.column_remarks()]

    def timing(self) -> list[str]:
        """What its times are of."""
        ran = next((row for row in self.rows if row.outcome == "ran"), None)
        if ran is None:
            return []
        turns = f"{count_of(len(ran.timed_seconds), 'step')} in {count_of(len(ran.seconds), 'turn')}"
        return [f"step ms: median [middle half] of {turns}, of the slowest rank"]

    def row_notes(self) -> list[str]:
        """Return what should be known of how worlds ran, each with the world's name."""
        return [f"{row.cell}: {row.note}" for row in self.rows if row.outcome == "ran" and row.note]

    def marks_of_others(self, row: CellResult) -> dict[str, TrainingMarks]:
        """What the other rows were seen to train."""
        alike = ((r.cell, r.marks) for r in self.rows if r is not row and r.outcome in ("ran", "waits"))
        return {name: marks for name, marks in alike if marks is not None}


_FIELDS_NOT_STORED = ("rows", "answer", "unkept")
"""What compare.json holds by another name, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Comparison(TurnResults):
    """All cells of one comparison; `single`, the reference, is the first row."""

    samples: int
    """In one optimizer step."""

    ranks: int
    """Of every world but that of one process; 0 where the file does not tell."""

    answer: str = ""
    """Which cell is smallest, which is fastest, and why; made anew with the page."""

    @property
    def reference(self) -> CellResult | None:
        row = self.rows[0]
        return row if row.outcome == "ran" else None

    @override
    def training_difference(self, row: CellResult) -> str:
        return describe_training_difference(row.marks, self.marks_of_others(row)) if row.marks is not None else ""

    def rank_count(self, row: CellResult) -> int:
        """How many ranks it has, whoever of them left something."""
        return len(row.peak_rss) or (1 if row is self.rows[0] else self.ranks)

    @property
    def baseline(self) -> CellResult | None:
        """What step times are put in proportion to: the first cell besides `single` that has any."""
        return next((row for row in self.rows[1:] if row.timed_seconds and row.outcome in ("ran", "waits")), None)

    def agreement(self, row: CellResult) -> Agreement | None:
        """With the one process; None where there is nothing to hold together."""
        if self.reference is None or row is self.reference or row.outcome != "ran":
            return None
        allowed = loss_tolerance(self.precision)
        if not row.parts:
            return measure_agreement(row.losses, self.reference.losses, allowed)
        held = [
            replace(measure_agreement(row.parts[p], one, allowed), part=p)
            for p, one in self.reference.parts.items()
            if one
        ]
        return min(held, key=lambda a: (a.within, math.inf if a.digits is None else a.digits))

    @property
    def disagreeing_rows(self) -> list[CellResult]:
        held = [(row, self.agreement(row)) for row in self.rows]
        return [row for row, found in held if found is not None and not found.within]

    @property
    def finished(self) -> bool:
        """Whether running it again could tell nothing new."""
        return not self.interrupted and all(row.outcome in ("ran", "refused") for row in self.rows)

    @property
    @override
    def ran_and_agrees(self) -> bool:
        return any(row.outcome == "ran" for row in self.rows[1:]) and not self.disagreeing_rows

    @override
    def extra_tables(self, width: int) -> list[str]:
        known = [row for row in self.rows if row.memory and row.outcome != "unlike"]
        watched = [(_name_until_failure(row), self.rank_count(row), row.memory) for row in known]
        return ["", *format_memory_tables(watched, width)] if watched else []

    @override
    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each row; where they would be too wide, without x."""
        last = "allocated" if self._watched else "RSS"
        rows = [("cell", "loss", "step ms", "x", "samples/s", last), *map(self._shown, self.rows)]
        made = format_table_rows(rows[0], rows[1:], right=(2, 3, 4, 5), width=width)
        if max(len(line) for block in made for line in block) <= width:
            return made
        narrow = [row[:3] + row[4:] for row in rows]
        return format_table_rows(narrow[0], narrow[1:], right=(2, 3, 4), width=width)

    def _shown(self, row: CellResult) -> tuple[str, ...]:
        if not row.timed_seconds or row.outcome not in ("ran", "waits"):
            return row.cell, OUTCOME_PREFIXES[row.outcome] + (row.note or "waits")
        found = self.agreement(row)
        agrees = "reference" if row is self.reference else str(found or "-")
        if found is not None and not found.within:
            agrees += "!"
        middle = median(row.timed_seconds)
        factor = f"{middle / median(self.baseline.timed_seconds):.2f}" if self.baseline is not None else "-"
        return (
            row.cell,
            agrees,
            format_spread(row.timed_seconds),
            factor,
            f"{self.samples / middle:.{1 if self.samples / middle < 100 else 0}f}",
            self._memory_text(row),
        )

    @property
    def _watched(self) -> bool:
        return any(row.memory for row in self.rows)

    def _memory_text(self, row: CellResult) -> str:
        if self._watched:
            return format_size(largest_peak_bytes(row.memory)) if row.memory else "-"
        return format_size(max(row.peak_rss)) if row.peak_rss else "-"

    @override
    def column_remarks(self) -> list[Remark]:
        lines = table_remarks(*self.row_notes(), *self.verdict(), *self.timing())
        if self.baseline is not None:
            lines.append(Remark(column="x", text=f"x: step time in proportion to {self.baseline.cell}"))
        if self._watched:
            lines += describe_memory_columns([account for row in self.rows for account in row.memory])
            lines += table_remarks(*describe_peak_ranges([(row.cell, row.memory) for row in self.rows if row.memory]))
        elif any(row.outcome == "ran" for row in self.rows):
            lines.append(RSS)
        return [*lines, *table_remarks(self.unwatched, self.answer, self.unkept, self.note)]

    def verdict(self) -> list[str]:
        """Whether the cells agree, in a sentence or several."""
        if self.interrupted:
            return ["interrupted: cells without figures did not come to their end"]
        if self.reference is None:
            return ["no verdict: the one process to which the others are held did not run"]
        held = [(row, found) for row in self.rows if (found := self.agreement(row)) is not None]
        if not held:
            return ["no verdict: no cell besides the one process ran"]
        steps, allowed = len(self.reference.losses), loss_tolerance(self.precision)
        wrong = [
            f"DISAGREES: {row.cell} by {found.off:.1e} at step {found.step}{found.part_suffix}: {_loss_furthest_off(row, found):.8g}"
            f" for {_loss_furthest_off(self.reference, found):.8g}; allowed in {self.precision}: {allowed:g}"
            for row, found in held
            if not found.within
        ]
        if wrong:
            return wrong
        least = min((found.digits for _, found in held if found.digits is not None), default=None)
        how = "bit for bit" if least is None else f"to {least} digits or more"
        cells = f"all {len(held)} cells agree" if len(held) > 1 else f"{held[0][0].cell} agrees"
        first, last = self.reference.losses[0], self.reference.losses[-1]
        return [
            f"{cells} with one process {how}, over {count_of(steps, 'step')}",
            f"loss of one process: {first:.4f} at step 1, {last:.4f} at step {steps}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Every figure; the verdicts besides, for those who read only this."""
        made = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FIELDS_NOT_STORED}
        return {**made, "cells": [self._row_json(row) for row in self.rows]}

    def _row_json(self, row: CellResult) -> dict[str, Any]:
        found = self.agreement(row)
        return cell_result_to_json(row) | {
            "agreement": None if found is None else {"says": str(found), **asdict(found)}
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], **changed: Any) -> Self:
        rows = [cell_result_from_json(told) for told in data["cells"]]
        data = {"unwatched": "", "ranks": max((len(row.peak_rss) for row in rows), default=0), **data}
        kept = {f.name: data[f.name] for f in fields(cls) if f.name not in _FIELDS_NOT_STORED}
        return cls(**{**kept, **changed}, rows=rows)


def _name_until_failure(row: CellResult) -> str:
    """What was measured of a cell that failed was measured before."""
    return f"{row.cell}, till it failed" if row.outcome == "failed" else row.cell


def _loss_furthest_off(row: CellResult, found: Agreement) -> float:
    """The one that is furthest off."""
    return (row.parts[found.part] if found.part else row.losses)[found.step - 1]
