"""A command's answer in one screen: its table, its answer's room, and rows without figures."""

from __future__ import annotations

from typing import Any

from unipar.utils.columns import Column, Reason
from unipar.utils.screen import Screen, format_next_steps

Figures = tuple[str, str, str, str]
"""Name, name in the library, figure, reason."""

COLUMNS: list[Column[Figures]] = [
    Column("strategy", lambda row: row[0], right=False),
    Column("known as", lambda row: row[1] or None, right=False, shortened=True, dropped=1, optional=True),
    Column("step", lambda row: row[2]),
]
LONG = "batch.total (8) is not a multiple of micro x data (2 x 8 = 16); the smallest is 16\nsecond line"


def shown(rows: list[Figures], width: int = 80, **changed: Any) -> list[str]:
    told: dict[str, Any] = {"answer": "they agree", "columns": COLUMNS} | changed
    screen = Screen[Figures](
        rows=rows, reason=lambda row: Reason(kind="refused", text=row[3]) if row[3] else None, **told
    )
    return screen.format(width).splitlines()


def ran(count: int) -> list[Figures]:
    return [(f"native/{i}", "DDP", f"{i} ms", "") for i in range(count)]


def test_answer_table_next_steps() -> None:
    """In this order, with a line between them; what is empty is not there."""
    assert shown(ran(1), warnings=["", "but slowly"], next_steps=["unipar a", "unipar b"], last=["page: x"]) == [
        "they agree",
        "but slowly",
        "",
        "strategy  known as  step",
        "native/0  DDP       0 ms",
        "",
        "next: unipar a",
        "      unipar b",
        "page: x",
    ]
    assert shown(ran(1))[-1] == "native/0  DDP       0 ms"


def test_a_reason_is_one_line() -> None:
    """Its first line, cut between words where the screen ends."""
    assert shown([*ran(1), ("native/b", "", "", LONG), ("native/c", "", "", "no\nmore")])[-2:] == [
        "native/b  batch.total (8) is not a multiple of micro x data (2 x 8 = 16); ...",
        "native/c  no",
    ]


def test_a_folded_name_keeps_its_end() -> None:
    """Where a name goes on in a second line, its row's reason is still one line."""
    lines = shown([*ran(1), ("deepspeed/gradients+library", "", "", LONG)], width=42)
    assert lines[-2:] == ["deepspeed/gradients  batch.total (8) ...", "  +library"]


def test_many_rows_without_figures_are_a_line() -> None:
    """Three have rows; four are named below the table, with the place where their reasons are."""
    reasons: list[Figures] = [(f"x/{i}", "", "", "no") for i in range(4)]
    assert sum(line.startswith("x/") for line in shown([*ran(2), *reasons[:3]])) == 3
    lines = shown([*ran(2), *reasons])
    assert not any(line.startswith("x/") for line in lines)
    assert lines[-1] == "4 refused: x/0, x/1, x/2 and 1 more (reasons: --details, or the page)"


def test_twenty_four_lines() -> None:
    """The answer's warnings have the room that ten rows and the steps leave; a longer table leaves them four lines."""
    warnings = [f"warning {i}" for i in range(30)]
    for rows, lines in ((2, 24), (10, 24), (14, 25)):
        said = shown(ran(rows), warnings=warnings, next_steps=["a", "b"], last=["c"])
        assert len(said) == lines
        assert said[0] == "they agree"
        assert sum(line.startswith("native/") for line in said) == rows
        assert said[said.index("") - 1] == "  ... (all of it: --details)"


def test_a_column_is_shortened_and_then_left_out() -> None:
    """Names of libraries give way first; no line is wider than the screen."""
    rows: list[Figures] = [("native/optimizer", "ZeroRedundancyOptimizer", "10 ms", "")]
    assert shown(rows, width=48)[-1] == "native/optimizer  ZeroRedundancyOptimizer  10 ms"
    assert shown(rows, width=47)[-1] == "native/optimizer  ZeroRedundancyOptim...  10 ms"
    assert shown(rows, width=43)[-1] == "native/optimizer  ZeroRedundancyO...  10 ms"
    assert shown(rows, width=33)[-1] == "native/optimizer  ZeroR...  10 ms"
    assert shown(rows, width=32)[-1] == "native/optimizer  10 ms"


def test_a_column_without_texts_is_left_out() -> None:
    """Where no library has a name for any row, there is no such column; a single empty text is a dash."""
    assert shown([("native/a", "", "1 ms", "")])[-2:] == ["strategy  step", "native/a  1 ms"]
    both: list[Figures] = [("native/a", "", "1 ms", ""), ("native/b", "DDP", "1 ms", "")]
    assert shown(both)[-2] == "native/a  -         1 ms"


def test_a_command_keeps_its_line() -> None:
    """It is never wrapped; its comment is left out if the line would be too long."""
    step = "unipar verify some/config.yaml   # a comment"
    assert format_next_steps([step], 80) == [f"next: {step}"]
    assert format_next_steps([step, step], 20) == [
        "next: unipar verify some/config.yaml",
        "      unipar verify some/config.yaml",
    ]
