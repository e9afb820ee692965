"""A comparison or a proof while it goes on: one live table on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from unipar.text import format_duration

_STYLES = {
    "failed": "red",
    "unlike": "red",
    "disagrees": "red",
    "absent": "yellow",
    "refused": "yellow",
    "waits": "dim",
}


class Row(Protocol):
    @property
    def outcome(self) -> str: ...


class Shown(Protocol):
    """A table in the making."""

    @property
    def rows(self) -> Sequence[Row]: ...

    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each row."""
        ...


class Board:
    """Shows each change; on leaving, a live table is wiped, for the caller prints the final one."""

    def __init__(self) -> None:
        self._live: Any = None  # rich.live.Live, imported only where there is a terminal
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False, markup=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, so_far: Shown, line: str) -> None:
        """`line` says what has just changed."""
        since = format_duration(max(time.monotonic() - self._began, 0.1))
        if self._live is None:
            print(f"{since:>9}  {line}", file=sys.stderr, flush=True)  # noqa: T201 - this is the terminal's side
            return
        from rich.text import Text

        drawn = Text(no_wrap=True, overflow="crop")
        header, *rows = so_far.blocks(self._live.console.width)
        drawn.append("\n".join(header) + "\n", "bold")
        for row, lines in zip(so_far.rows, rows, strict=True):
            drawn.append("\n".join(lines) + "\n", _STYLES.get(row.outcome, ""))
        drawn.append(f"\n{since}  {line}", "dim")
        self._live.update(drawn, refresh=True)
