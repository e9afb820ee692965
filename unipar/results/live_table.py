"""Display of a running comparison or verification: a live table in a terminal, a line in a notebook, or lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from unipar.utils.terminal import Terminal
from unipar.utils.text import format_duration

_STYLES = {
    "failed": "red",
    "unlike": "red",
    "disagrees": "red",
    "absent": "yellow",
    "refused": "yellow",
    "waits": "dim",
}


class LiveRow(Protocol):
    """Row of a live table; its outcome decides its colour."""

    @property
    def outcome(self) -> str: ...


class LiveTableData(Protocol):
    """Results so far, as a table."""

    @property
    def rows(self) -> Sequence[LiveRow]: ...

    def blocks(self, width: int) -> list[list[str]]:
        """Return the lines of the header, then of each row."""
        ...


class LiveTable:
    """Context manager: shows each change; a live table is removed on exit, because the caller prints the final one."""

    def __init__(self) -> None:
        self._terminal = Terminal(sys.stderr)
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._terminal.can_draw:
            self._terminal.draw_block()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._terminal.stop()

    def show(self, so_far: LiveTableData, line: str) -> None:
        """Show the results so far; `line` says what has just changed."""
        since = format_duration(max(time.monotonic() - self._began, 0.1))
        if not self._terminal.draws:
            self._terminal.progress_line(f"{since:>9}  {line}")
            return
        header, *rows = so_far.blocks(self._terminal.width)
        styles = ["bold", *(_STYLES.get(row.outcome, "") for row in so_far.rows)]
        drawn = [("\n".join(lines) + "\n", style) for lines, style in zip((header, *rows), styles, strict=True)]
        self._terminal.show_block([*drawn, (f"\n{since}  {line}", "dim")])
