"""Live output of a running command: a bar, spinner or block in a terminal, a line in a notebook, or plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from unipar.utils.notebook import ReplacedLine, in_notebook


class Terminal:
    """An output stream; if it is a terminal, one bar, spinner or block at a time can be drawn below its lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._replaced = ReplacedLine() if stream is sys.stderr and in_notebook() else None
        self._drawn: Any = None  # rich's Progress or Live; rich is imported only where something is drawn

    @property
    def can_draw(self) -> bool:
        """Whether the stream is a terminal that can move its cursor."""
        return self._stream.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def draws(self) -> bool:
        """Whether a bar, spinner or block is drawn now."""
        return self._drawn is not None

    @property
    def width(self) -> int:
        """Width of the terminal in columns; available only while something is drawn."""
        return self._drawn.console.width

    def line(self, text: str) -> None:
        """Write a line, above the bar, spinner or block if there is one."""
        if self._drawn is not None:
            self._drawn.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def progress_line(self, text: str) -> None:
        """Write a line that the next one makes worthless; in a notebook that one takes its place."""
        if self._replaced is not None and self._drawn is None:
            self._replaced.show(text)
        else:
            self.line(text)

    def draw_bar(self, text: str, *, redirect_stdout: bool) -> None:
        """Draw a line with a text, a bar and a second text (set by `move_bar(says=...)`); `stop` removes the line.

        With `redirect_stdout`, lines that this process prints appear above it.
        """
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[says]}"))
        self._drawn = Progress(
            *columns,
            console=self._console(),
            redirect_stdout=redirect_stdout,
            redirect_stderr=False,
            transient=True,
            auto_refresh=False,  # the caller refreshes, so rich starts no thread
            expand=True,
        )
        self._drawn.add_task(text, total=None, says="")
        self._drawn.start()

    def draw_spinner(self, text: str) -> None:
        """Draw a line with a spinner, a text, a bar, a percentage and the elapsed time; the line stays after `stop`."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        self._drawn = Progress(*columns, TaskProgressColumn(), TimeElapsedColumn(), console=self._console())
        self._drawn.start()
        self._drawn.add_task(text, total=None)

    def draw_block(self) -> None:
        """Begin a block of lines, which `show_block` fills and `stop` removes."""
        from rich.live import Live

        self._drawn = Live(console=self._console(), auto_refresh=False, transient=True)
        self._drawn.start()

    def move_bar(self, **changes: Any) -> None:
        """Change what the bar or the spinner shows: description, completed, total, says."""
        self._drawn.update(self._drawn.task_ids[0], **changes)

    def refresh(self) -> None:
        """Redraw the bar."""
        self._drawn.refresh()

    def show_block(self, styled: Iterable[tuple[str, str]]) -> None:
        """Replace the block by pairs of a text and a rich style; lines that are too long are cut."""
        from rich.text import Text

        content = Text(no_wrap=True, overflow="crop")
        for text, style in styled:
            content.append(text, style)
        self._drawn.update(content, refresh=True)

    def stop(self) -> None:
        """End the bar, spinner or block, if there is one."""
        if self._drawn is not None:
            self._drawn.stop()
            self._drawn = None

    def _console(self) -> Any:
        from rich.console import Console

        return Console(file=self._stream, highlight=False, markup=False)
