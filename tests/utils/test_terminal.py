"""What is drawn on a terminal, and the lines that are written elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from typing_extensions import override

from unipar.results.live_table import LiveTable
from unipar.utils.terminal import Terminal

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """A terminal of 80 columns, whatever the tests run in."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_where_something_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal that can move its cursor."""
    assert Terminal(Screen()).can_draw
    assert not Terminal(io.StringIO()).can_draw
    monkeypatch.setenv("TERM", "dumb")
    assert not Terminal(Screen()).can_draw


def test_a_line_goes_above_what_is_drawn() -> None:
    """As it is: nothing in it is markup; a stop wipes the bar and leaves the line."""
    screen = Screen()
    terminal = Terminal(screen)
    terminal.draw_bar("starting", redirect_stdout=False)
    terminal.move_bar(description="step 1/2", completed=1, total=2, says="loss 1.0")
    terminal.refresh()
    terminal.line("[bold]said[/bold]")
    terminal.stop()
    text = ESCAPE.sub("", screen.getvalue())
    assert "[bold]said[/bold]\nstep 1/2 ━" in text
    assert text.count("loss 1.0") >= 1
    assert screen.getvalue().rstrip("\r").endswith("\x1b[2K")


class _Row:
    outcome = "failed"


class _Table:
    rows: Sequence[_Row] = (_Row(),)

    def blocks(self, width: int) -> list[list[str]]:
        return [[f"strategy, in {width} columns"], ["native/nothing  failed"]]


def test_a_board_elsewhere_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time since it began, and what has changed; no table."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    with LiveTable() as board:
        board.show(_Table(), "starts")
    assert written.getvalue() == "   100 ms  starts\n"


def test_a_board_on_a_terminal_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, a row in its colour, and the last change; all of it is wiped at the end."""
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with LiveTable() as board:
        board.show(_Table(), "starts")
        drawn = screen.getvalue()
    assert ESCAPE.sub("", drawn).endswith("strategy, in 80 columns\nnative/nothing  failed\n\n100 ms  starts")
    assert "\x1b[31mnative/nothing  failed" in drawn
    assert screen.getvalue().rstrip("\r").endswith("\x1b[2K")
