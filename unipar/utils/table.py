"""Tables in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass

COLUMN_GAP = "  "


NARROWEST_CELL = 20
"""What a cell that wraps is given at least, on however narrow a terminal."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A sentence below a table; one on a column is left out where the table has not that column."""

    column: str = ""
    """The head of the column that it is on; empty: it is on the table as a whole."""

    text: str


def table_remarks(*texts: str) -> list[Remark]:
    """Return remarks on the table as a whole; an empty text is none."""
    return [Remark(text=text) for text in texts if text]


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int = 80
) -> str:
    """`rows` below `header`, the columns in `right` with their ends in line.

    A row may be shorter than the header: then its last cell is a sentence that takes the rest of
    the line and wraps there. So does the last cell of a whole row that would not fit.
    """
    return "\n".join(text for block in format_table_rows(header, rows, right=right, width=width) for text in block)


def format_table_rows(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int = 80
) -> list[list[str]]:
    """The same, a list of lines for the header and for each row, for one who colours them."""
    whole = [row for row in [header, *rows] if len(row) == len(header)]
    wide = [max(len(row[i]) for row in whole) for i in range(len(header))]
    for row in rows:
        for i, text in enumerate(row[:-1]):
            wide[i] = max(wide[i], len(text))
    return [_row_lines(row, wide, right, width) for row in [header, *rows]]


def _row_lines(row: Sequence[str], wide: Sequence[int], right: Collection[int], width: int) -> list[str]:
    *first, last = row
    head = "".join((t.rjust(wide[i]) if i in right else t.ljust(wide[i])) + COLUMN_GAP for i, t in enumerate(first))
    at = len(row) - 1
    if len(row) == len(wide) and at in right:
        return [head + last.rjust(wide[at])]
    folded = [
        line
        for paragraph in last.splitlines() or [""]
        for line in textwrap.wrap(paragraph, max(width - len(head), NARROWEST_CELL), break_on_hyphens=False) or [""]
    ]
    return [((head if i == 0 else " " * len(head)) + line).rstrip() for i, line in enumerate(folded)]
