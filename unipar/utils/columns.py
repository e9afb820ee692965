"""`Column`: a column of a result, described once, which texts, pages and CSV files show."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Generic, TypeVar

from unipar.utils.table import format_table_rows

Row = TypeVar("Row")
OuterRow = TypeVar("OuterRow")

NO_TEXT: Final = "-"
"""Text for a value that is not known."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column: the value of a row, how it is shown, what it means, and what becomes of it in a narrow table."""

    head: str
    value: Callable[[Row], Any]
    """Value of a row, as CSV files have it; None if it is not known."""

    format: Callable[[Any], str] = str
    """Text of a value that is known."""

    _: KW_ONLY
    key: str = ""
    """Name by which renderers choose the column, and its head in CSV files; empty: its head."""

    remark: str = ""
    """Sentence for those who read the details; empty if the head says it."""

    right: bool = True
    """Whether texts are aligned right."""

    page_format: Callable[[Any], str] | None = None
    """Text of a value on pages, if it is another one there."""

    short: Callable[[Any], str] | None = None
    """Text of a value where the table is too wide, if there is a shorter one."""

    shortened: bool = False
    """Whether texts may be cut, with "..." at the end."""

    dropped: int = 0
    """Place in the order in which columns are left out; 0: the column always stays."""

    optional: bool = False
    """Whether the column is left out if no row has a value."""

    def text(self, row: Row, unknown: str = NO_TEXT) -> str:
        """Return the text of a row's value, or `unknown`."""
        value = self.value(row)
        return unknown if value is None else self.format(value)

    def of(self, inner: Callable[[OuterRow], Row | None]) -> Column[OuterRow]:
        """Return the column for rows that hold a row of this one, or None if its value is not known."""

        def value(outer: OuterRow) -> Any:
            row = inner(outer)
            return None if row is None else self.value(row)

        same: dict[str, Any] = vars(self) | {"value": value}
        return Column(**same)


@dataclass(frozen=True)
class Reason:
    """Reason why a row has no figures."""

    kind: str
    """Kind of reason in a word or two: failed, refused, not installed."""

    text: str
    """The reason, of which the table shows the first line."""


def choose_columns(columns: Iterable[Column[Row]], *keys: str, **heads: str) -> list[Column[Row]]:
    """Return the columns with these keys, in their order; `heads` has other heads for some of them."""
    by_key = {column.key or column.head: column for column in columns}
    return [replace(by_key[key], key=key, head=heads.get(key, by_key[key].head)) for key in keys]


def known_columns(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns without optional ones in which no row has a value."""
    return [c for c in columns if not c.optional or any(c.value(row) is not None for row in rows)]


def row_texts(
    columns: Sequence[Column[Row]], row: Row, *, unknown: str = NO_TEXT, reason: Reason | None = None, leading: int = 1
) -> list[str]:
    """Return the texts of a row; if there is a reason why it has no figures, the leading ones and the reason."""
    if reason is None:
        return [column.text(row, unknown) for column in columns]
    return [*(column.text(row, unknown) for column in columns[:leading]), reason.text]


def table_blocks(
    columns: Sequence[Column[Row]],
    rows: Iterable[Row],
    *,
    width: int,
    reason: Callable[[Row], Reason | None] = lambda _: None,
    leading: int = 1,
    fold: bool = False,
) -> list[list[str]]:
    """Return the lines of the header, then of each row; `fold`: long names in the first column may be folded."""
    texts = [row_texts(columns, row, reason=reason(row), leading=leading) for row in rows]
    right = [i for i, column in enumerate(columns) if column.right]
    return format_table_rows([column.head for column in columns], texts, right=right, width=width, fold=fold)


def fitting_table(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    *,
    width: int,
    reason: Callable[[Row], Reason | None] = lambda _: None,
    leading: int = 1,
    fold: bool = False,
) -> tuple[Sequence[Column[Row]], list[list[str]]]:
    """Return the columns that fit, and the lines of the header and of each row.

    Where the table is too wide, texts are short, then columns are left out in their order, and at last names in the
    first column are folded; `fold`: names are folded first.
    """
    narrow = [column if column.short is None else replace(column, format=column.short) for column in columns]
    places = sorted({column.dropped for column in columns} - {0})
    attempts = [columns, *([narrow] if any(column.short for column in columns) else [])]
    attempts += [[column for column in narrow if not 0 < column.dropped <= place] for place in places]
    for shown in attempts:
        folds = fold or shown is attempts[-1]
        blocks = table_blocks(shown, rows, width=width, reason=reason, leading=leading, fold=folds)
        if shown is attempts[-1] or max(len(line) for block in blocks for line in block) <= width:
            return shown, blocks
    raise AssertionError("the last attempt is returned")


def format_csv(keys: Sequence[str], columns: Iterable[Column[Row]], rows: Iterable[Row]) -> str:
    """Return rows as CSV, under these keys; values that are not known, and keys without a column, are empty."""
    by_key = {column.key or column.head: column for column in columns}
    shown = [by_key.get(key) for key in keys]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([_stored_text(None if c is None else c.value(row)) for c in shown] for row in rows)
    return text.getvalue()


def _stored_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
