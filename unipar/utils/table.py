"""Tables in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

COLUMN_GAP = "  "

NARROWEST_CELL = 20
"""Least width of a cell that wraps, in characters, even if the terminal is narrower."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A sentence below a table; a remark about a column is left out if the table does not have that column."""

    column: str = ""
    """Head of the column that the remark is about; empty: the table as a whole."""

    text: str


def table_remarks(*texts: str) -> list[Remark]:
    """Return remarks about the table as a whole; empty texts are left out."""
    return [Remark(text=text) for text in texts if text]


def wrap_lines(texts: Iterable[str], width: int, *, at_hyphens: bool = True) -> list[str]:
    """Return sentences as lines, the further ones of each indented; `at_hyphens`: words may be broken there."""
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=at_hyphens)
    ]


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int = 80
) -> str:
    """Return `rows` below `header` as text; the columns with the indices in `right` are aligned right.

    A row may be shorter than the header: then its last cell is a sentence that takes the rest of
    the line and wraps there. The last cell of a full row wraps in the same way if it does not fit.
    """
    return "\n".join(text for block in format_table_rows(header, rows, right=right, width=width) for text in block)


def format_table_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    width: int = 80,
    fold: bool = False,
) -> list[list[str]]:
    """Return the table of `format_table` as lists of lines, one list for the header and one for each row.

    `fold`: where the table is too wide, long names in the first column go on in further lines, from a `+` on.
    """
    full_rows = [row for row in [header, *rows] if len(row) == len(header)]
    widths = [max(len(row[i]) for row in full_rows) for i in range(len(header))]
    for row in rows:
        for i, text in enumerate(row[:-1]):
            widths[i] = max(widths[i], len(text))
    further: list[list[str]] = [[] for _ in range(len(rows) + 1)]
    most = widths[0] - (sum(widths) + len(COLUMN_GAP) * (len(widths) - 1) - width)
    if fold and most < widths[0]:
        names = [_fold_name(row[0], max(most, NARROWEST_CELL)) for row in rows]
        rows = [[name[0], *row[1:]] for name, row in zip(names, rows, strict=True)]
        further[1:] = [name[1:] for name in names]
        widths[0] = max(len(line) for name in [[header[0]], *names] for line in name)
    lines = [_row_lines(row, widths, right, width) for row in [header, *rows]]
    return [list(_overlay(block, names)) for block, names in zip(lines, further, strict=True)]


def _overlay(lines: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield a row's lines, with the further lines of its name before the second line and those that follow it."""
    for name, line in zip_longest(["", *names], lines, fillvalue=""):
        yield name + line[len(name) :]


def _fold_name(name: str, most: int) -> list[str]:
    """Return the lines of a name, each of at most this many characters if that is possible with breaks before `+`."""
    first, *words = name.split("+")
    lines = [first]
    for word in words:
        if len(lines[-1]) + 1 + len(word) <= most:
            lines[-1] += f"+{word}"
        else:
            lines.append(f"  +{word}")
    return lines


def _row_lines(row: Sequence[str], widths: Sequence[int], right: Collection[int], width: int) -> list[str]:
    *first, last = row
    head = "".join((t.rjust(widths[i]) if i in right else t.ljust(widths[i])) + COLUMN_GAP for i, t in enumerate(first))
    index = len(row) - 1
    if len(row) == len(widths) and index in right:
        return [head + last.rjust(widths[index])]
    folded = [
        line
        for paragraph in last.splitlines() or [""]
        for line in textwrap.wrap(paragraph, max(width - len(head), NARROWEST_CELL), break_on_hyphens=False) or [""]
    ]
    return [((head if i == 0 else " " * len(head)) + line).rstrip() for i, line in enumerate(folded)]
