"""`Screen`: a command's answer in one screen: the answer in a sentence, a table, and the next steps."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, Generic

from unipar.utils.columns import Column, Reason, Row, known_columns, row_texts
from unipar.utils.table import format_table_rows
from unipar.utils.text import first_few

MOST_LINES: Final = 24
"""Lines of a screen whose table has at most ten rows; a longer table is shown in full, and takes more."""

LEAST_ANSWER_LINES: Final = 5
"""Lines that the answer and its warnings have, however long the table is."""

MOST_REASONS: Final = 3
"""Rows without figures that the table shows, each with its reason; if there are more, a line below names them."""

SHORTEST_TEXT: Final = 8
"""Characters to which a column that may be shortened is cut at most, before columns are left out."""

_COMMENT: Final = "   # "
"""Beginning of the comment on a command that may be typed next."""


@dataclass(frozen=True, kw_only=True)
class Screen(Generic[Row]):
    """The answer, what limits it, the table, and the next steps; `str` of a result and each command print it.

    All rows with figures are in the table. Up to three rows without figures are lines of it, cut at the screen's width;
    if there are more, a line below the table names some of each kind. The answer and its warnings have what is left of
    24 lines, but at least five; what does not fit is left to `--details`.
    """

    answer: str
    warnings: Sequence[str] = ()
    """Sentences that limit the answer."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    reason: Callable[[Row], Reason | None] = lambda _: None
    """Reason why a row has no figures, or None if it has."""

    leading: int = 1
    """Number of columns that a row without figures has, before its reason."""

    next_steps: Sequence[str] = ()
    last: Sequence[str] = ()
    """Lines at the end: where the page is."""

    def format(self, width: int = 80) -> str:
        """Return the screen as text, in lines of at most `width` characters where names are not longer."""
        table, end = self._table(width), self._end(width)
        room = max(MOST_LINES - len(table) - len(end) - 1 - bool(end), LEAST_ANSWER_LINES)
        blocks = [self._answer(width, room), table, end]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _answer(self, width: int, room: int) -> list[str]:
        lines = [line for text in (self.answer, *self.warnings) if text for line in _wrap(text, width)]
        if len(lines) <= room:
            return lines
        return [*lines[: room - 1], "  ... (all of it: --details)"]

    def _end(self, width: int) -> list[str]:
        return [
            *format_next_steps(self.next_steps, width),
            *(line for text in self.last for line in _wrap(text, width)),
        ]

    def _table(self, width: int) -> list[str]:
        """Return the lines of the table, without rows that a line below it names."""
        reasons = [(row, why) for row in self.rows if (why := self.reason(row)) is not None]
        too_many = len(reasons) > MOST_REASONS
        rows = [row for row in self.rows if not (too_many and self.reason(row) is not None)]
        lines = self._rows_that_fit(rows, width)
        if not too_many:
            return lines
        return [*lines, *(line for text in self._kinds(reasons) for line in _wrap(text, width))]

    def _kinds(self, reasons: Sequence[tuple[Row, Reason]]) -> list[str]:
        """Return a line on each kind of reason, with the names of some rows, and where their reasons are."""
        kinds: dict[str, list[str]] = {}
        for row, why in reasons:
            name = " ".join(column.text(row) for column in self.columns[: self.leading])
            kinds.setdefault(why.kind, []).append(name)
        texts = [f"{len(names)} {kind}: {first_few(names)}" for kind, names in kinds.items()]
        return [*texts[:-1], f"{texts[-1]} (reasons: --details, or the page)"]

    def _rows_that_fit(self, rows: Sequence[Row], width: int) -> list[str]:
        """Return the table's lines: texts are cut first, then names are folded, then columns are left out."""
        figures = [row for row in rows if self.reason(row) is None]
        leading, further = self.columns[: self.leading], self.columns[self.leading :]
        columns = [*leading, *(known_columns(further, figures) if figures else [])]
        order = sorted((c for c in columns if c.dropped), key=lambda c: c.dropped)
        while True:
            for fold in (False, True):
                lines = self._lines(columns, rows, width, fold=fold)
                if _widest(lines) > width:
                    lines = self._lines(columns, rows, width, fold=fold, cut=self._cut(columns, rows, lines, width))
                if _widest(lines) <= width:
                    return lines
            if not order:
                return lines
            gone = order.pop(0)
            columns = [column for column in columns if column is not gone]

    def _cut(self, columns: Sequence[Column[Row]], rows: Sequence[Row], lines: Sequence[str], width: int) -> int:
        """Return the characters that a shortened column has where the others keep theirs."""
        most = max((len(c.text(row)) for c in columns if c.shortened for row in rows), default=0)
        head = max((len(c.head) for c in columns if c.shortened), default=0)
        return max(SHORTEST_TEXT, head, most - (_widest(lines) - width))

    def _lines(
        self, columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, *, fold: bool, cut: int | None = None
    ) -> list[str]:
        def cut_texts(row: Row) -> list[str]:
            texts = row_texts(columns, row)
            return [_shorten(t, cut) if cut and c.shortened else t for c, t in zip(columns, texts, strict=True)]

        if len(columns) == self.leading + 1:  # a row with a reason has to be shorter than the others
            columns = [*columns, Column("", lambda _: "", right=False)]
        whys = [self.reason(row) for row in rows]
        lines = [why and replace(why, text=why.text.partition("\n")[0]) for why in whys]
        texts = [
            row_texts(columns, row, reason=why, leading=self.leading) if why else cut_texts(row)
            for row, why in zip(rows, lines, strict=True)
        ]
        right = [i for i, column in enumerate(columns) if column.right]
        head = tuple(column.head for column in columns)
        blocks = format_table_rows(head, texts, right=right, width=width, fold=fold)
        return [
            line
            for block, why in zip(blocks, [None, *whys], strict=True)
            for line in (block if why is None else _without_rest(block, width))
        ]


def format_next_steps(steps: Sequence[str], width: int = 80) -> list[str]:
    """Return the lines that say what to do next; one that is too long loses its comment, and is not wrapped."""
    lines = [("next: " if i == 0 else "      ") + step for i, step in enumerate(steps)]
    return [line if len(line) <= width else line.partition(_COMMENT)[0] for line in lines]


def _without_rest(block: Sequence[str], width: int) -> list[str]:
    """Return a row's first line, with "..." if its sentence goes on, and the further lines of its name."""
    first, *rest = block
    names = [f"  {line.split()[0]}" for line in rest if line.startswith("  +")]
    goes_on = any(line[len(name) :].strip() for line, name in zip_longest(rest, names, fillvalue=""))
    if goes_on:
        first = f"{first if len(first) <= width - 4 else first[: width - 3].rpartition(' ')[0].rstrip()} ..."
    return [first, *names]


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3].rstrip(' ,')}..."


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _widest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)
