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
from unipar.results.agreement import Agreement, agreement, tolerance
from unipar.results.memory_tables import RSS, largest, memory_tables, remarks, varied
from unipar.results.row import HEADS, Row, row_json, row_of, spread
from unipar.results.same_training import Marks, unlike
from unipar.utils.table import Remark, blocks, table_remarks
from unipar.utils.text import count_of, format_size


@dataclass(frozen=True, kw_only=True)
class Found(ABC):
    """What came of worlds that took turns, a row for each."""

    name: str
    out: str
    precision: Precision
    warmup: int
    """Steps before the timed ones."""

    rows: list[Row]
    note: str = ""
    unwatched: str = ""
    """Why no memory is shown."""

    interrupted: bool = False
    unkept: str = ""
    """Why its folder has not all of this."""

    @abstractmethod
    def unlike(self, row: Row) -> str:
        """Why this one did not train what the others do, as far as was seen; empty: it did."""

    @property
    @abstractmethod
    def right(self) -> bool:
        """Whether any ran that was to be found out about, and none disagrees."""

    @property
    def code(self) -> int:
        """What the command line exits with: refusals are an answer, failures and disagreement are not."""
        if self.interrupted:
            return 130
        if self.unkept:
            return 1
        return 0 if self.right and not {"failed", "unlike"} & {row.outcome for row in self.rows} else 1

    @override
    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 80) -> str:
        made, beside = self.blocks(width), self.beside(width)
        head = " ".join([made[0][0], *beside]).split()
        shown = [r.text for r in self.column_remarks() if not r.column or r.column in head]
        said = [line for text in shown for line in textwrap.wrap(text, width, subsequent_indent="  ")]
        return "\n".join(["\n".join(lines) for lines in made] + [*beside, "", *said])

    @abstractmethod
    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each row."""

    def beside(self, width: int) -> list[str]:
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
        turns = f"{count_of(len(ran.timed), 'step')} in {count_of(len(ran.seconds), 'turn')}"
        return [f"step ms: median [middle half] of {turns}, of the slowest rank"]

    def row_notes(self) -> list[str]:
        """Return what should be known of how worlds ran, each with the world's name."""
        return [f"{row.cell}: {row.note}" for row in self.rows if row.outcome == "ran" and row.note]

    def others(self, row: Row) -> dict[str, Marks]:
        """What the other rows were seen to train."""
        alike = ((r.cell, r.marks) for r in self.rows if r is not row and r.outcome in ("ran", "waits"))
        return {name: marks for name, marks in alike if marks is not None}


_APART = ("rows", "answer", "unkept")
"""What compare.json holds by another name, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Found):
    """All cells of one comparison; `single`, the reference, is the first row."""

    samples: int
    """In one optimizer step."""

    ranks: int
    """Of every world but that of one process; 0 where the file does not tell."""

    answer: str = ""
    """Which cell is smallest, which is fastest, and why; made anew with the page."""

    @property
    def reference(self) -> Row | None:
        row = self.rows[0]
        return row if row.outcome == "ran" else None

    @override
    def unlike(self, row: Row) -> str:
        return unlike(row.marks, self.others(row)) if row.marks is not None else ""

    def world(self, row: Row) -> int:
        """How many ranks it has, whoever of them left something."""
        return len(row.peak_rss) or (1 if row is self.rows[0] else self.ranks)

    @property
    def baseline(self) -> Row | None:
        """What step times are put in proportion to: the first cell besides `single` that has any."""
        return next((row for row in self.rows[1:] if row.timed and row.outcome in ("ran", "waits")), None)

    def agreement(self, row: Row) -> Agreement | None:
        """With the one process; None where there is nothing to hold together."""
        if self.reference is None or row is self.reference or row.outcome != "ran":
            return None
        allowed = tolerance(self.precision)
        if not row.parts:
            return agreement(row.losses, self.reference.losses, allowed)
        held = [
            replace(agreement(row.parts[p], one, allowed), part=p) for p, one in self.reference.parts.items() if one
        ]
        return min(held, key=lambda a: (a.within, math.inf if a.digits is None else a.digits))

    @property
    def disagree(self) -> list[Row]:
        held = [(row, self.agreement(row)) for row in self.rows]
        return [row for row, found in held if found is not None and not found.within]

    @property
    def finished(self) -> bool:
        """Whether running it again could tell nothing new."""
        return not self.interrupted and all(row.outcome in ("ran", "refused") for row in self.rows)

    @property
    @override
    def right(self) -> bool:
        return any(row.outcome == "ran" for row in self.rows[1:]) and not self.disagree

    @override
    def beside(self, width: int) -> list[str]:
        known = [row for row in self.rows if row.memory and row.outcome != "unlike"]
        watched = [(_till(row), self.world(row), row.memory) for row in known]
        return ["", *memory_tables(watched, width)] if watched else []

    @override
    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each row; where they would be too wide, without x."""
        last = "allocated" if self._watched else "RSS"
        rows = [("cell", "loss", "step ms", "x", "samples/s", last), *map(self._shown, self.rows)]
        made = blocks(rows[0], rows[1:], right=(2, 3, 4, 5), width=width)
        if max(len(line) for block in made for line in block) <= width:
            return made
        narrow = [row[:3] + row[4:] for row in rows]
        return blocks(narrow[0], narrow[1:], right=(2, 3, 4), width=width)

    def _shown(self, row: Row) -> tuple[str, ...]:
        if not row.timed or row.outcome not in ("ran", "waits"):
            return row.cell, HEADS[row.outcome] + (row.note or "waits")
        found = self.agreement(row)
        agrees = "reference" if row is self.reference else str(found or "-")
        if found is not None and not found.within:
            agrees += "!"
        middle = median(row.timed)
        factor = f"{middle / median(self.baseline.timed):.2f}" if self.baseline is not None else "-"
        return (
            row.cell,
            agrees,
            spread(row.timed),
            factor,
            f"{self.samples / middle:.{1 if self.samples / middle < 100 else 0}f}",
            self._held(row),
        )

    @property
    def _watched(self) -> bool:
        return any(row.memory for row in self.rows)

    def _held(self, row: Row) -> str:
        if self._watched:
            return format_size(largest(row.memory)) if row.memory else "-"
        return format_size(max(row.peak_rss)) if row.peak_rss else "-"

    @override
    def column_remarks(self) -> list[Remark]:
        lines = table_remarks(*self.row_notes(), *self.verdict(), *self.timing())
        if self.baseline is not None:
            lines.append(Remark(column="x", text=f"x: step time in proportion to {self.baseline.cell}"))
        if self._watched:
            lines += remarks([account for row in self.rows for account in row.memory])
            lines += table_remarks(*varied([(row.cell, row.memory) for row in self.rows if row.memory]))
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
        steps, allowed = len(self.reference.losses), tolerance(self.precision)
        wrong = [
            f"DISAGREES: {row.cell} by {found.off:.1e} at step {found.step}{found.whose}: {_loss(row, found):.8g}"
            f" for {_loss(self.reference, found):.8g}; allowed in {self.precision}: {allowed:g}"
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
        made = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        return {**made, "cells": [self._row_json(row) for row in self.rows]}

    def _row_json(self, row: Row) -> dict[str, Any]:
        found = self.agreement(row)
        return row_json(row) | {"agreement": None if found is None else {"says": str(found), **asdict(found)}}

    @classmethod
    def from_json(cls, data: dict[str, Any], **changed: Any) -> Self:
        rows = [row_of(told) for told in data["cells"]]
        data = {"unwatched": "", "ranks": max((len(row.peak_rss) for row in rows), default=0), **data}
        kept = {f.name: data[f.name] for f in fields(cls) if f.name not in _APART}
        return cls(**{**kept, **changed}, rows=rows)


def _till(row: Row) -> str:
    """What was measured of a cell that failed was measured before."""
    return f"{row.cell}, till it failed" if row.outcome == "failed" else row.cell


def _loss(row: Row, found: Agreement) -> float:
    """The one that is furthest off."""
    return (row.parts[found.part] if found.part else row.losses)[found.step - 1]
