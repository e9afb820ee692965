"""Columns: texts of rows, tables that fit, and CSV."""

from __future__ import annotations

from unipar.utils.columns import Column, Reason, choose_columns, fitting_table, format_csv, row_texts

Figures = tuple[str, float | None]
"""Name and seconds."""

COLUMNS: list[Column[Figures]] = [
    Column("strategy", lambda row: row[0], right=False),
    Column("step", lambda row: row[1], "{:.3f} s".format, key="step_s", short="{:.0f}".format),
    Column("whole", lambda row: None if row[1] is None else row[1] == int(row[1]), str, dropped=1),
]
ROWS: list[Figures] = [("native/a", 2.0), ("native/b+c", 0.123456789), ("native/d", None)]


def test_texts_of_a_row() -> None:
    """A value that is not known has a sign of its own; a reason follows the leading texts."""
    assert [row_texts(COLUMNS, row) for row in ROWS] == [
        ["native/a", "2.000 s", "True"],
        ["native/b+c", "0.123 s", "False"],
        ["native/d", "-", "-"],
    ]
    assert row_texts(COLUMNS, ROWS[2], unknown="–") == ["native/d", "–", "–"]
    assert row_texts(COLUMNS, ROWS[2], reason=Reason("failed", "failed: no")) == ["native/d", "failed: no"]


def test_columns_are_chosen_by_key() -> None:
    """In the order of the keys; a column without a key goes by its head, and a table may have another head."""
    chosen = choose_columns(COLUMNS, "whole", "step_s", step_s="seconds")
    assert [(column.key, column.head) for column in chosen] == [("whole", "whole"), ("step_s", "seconds")]


def test_a_column_of_an_inner_row() -> None:
    """Where there is no inner row, the value is not known."""
    outer = COLUMNS[1].of({"x": ROWS[0]}.get)
    assert (outer.text("x"), outer.text("y"), outer.head) == ("2.000 s", "-", "step")


def test_a_table_that_is_too_wide() -> None:
    """Texts are short first, then columns are left out, and at last names are folded."""
    shown = {width: fitting_table(COLUMNS, ROWS[:2], width=width)[0] for width in (26, 25, 22)}
    assert {width: len(columns) for width, columns in shown.items()} == {26: 3, 25: 3, 22: 2}
    lines = {width: fitting_table(COLUMNS, ROWS[:2], width=width)[1][1] for width in (26, 25, 22)}
    assert lines == {26: ["native/a    2.000 s   True"], 25: ["native/a       2   True"], 22: ["native/a       2"]}
    long: list[Figures] = [("deepspeed/gradients+library", 1.0)]
    assert fitting_table(COLUMNS, long, width=30)[1][1] == ["deepspeed/gradients     1", "  +library"]


def test_csv() -> None:
    """Values as they are, numbers with six digits; a key without a column is empty."""
    assert format_csv(("strategy", "other", "step_s", "whole"), COLUMNS, ROWS).splitlines() == [
        "strategy,other,step_s,whole",
        "native/a,,2,yes",
        "native/b+c,,0.123457,no",
        "native/d,,,",
    ]
