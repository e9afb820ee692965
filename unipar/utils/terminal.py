"""What a person sees while something goes on: drawn at the end of a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TextIO


class Terminal:
    """A stream that a person may read: if it is a terminal, one thing at a time can be drawn at its end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: Any = None  # rich's Progress or Live; rich is imported only where something is drawn

    @property
    def can_draw(self) -> bool:
        """Whether the stream is a terminal that can move its cursor."""
        return self._stream.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def draws(self) -> bool:
        """Whether something is drawn at its end now."""
        return self._drawn is not None

    @property
    def width(self) -> int:
        """Columns, while something is drawn."""
        return self._drawn.console.width

    def line(self, text: str) -> None:
        """Write a line, above what is drawn."""
        if self._drawn is not None:
            self._drawn.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def draw_bar(self, text: str, *, redirect_stdout: bool) -> None:
        """Draw a text, a bar and another text (`move_bar(says=...)`) in one line; `stop` wipes it.

        With `redirect_stdout` what this process prints goes above it.
        """
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[says]}"))
        self._drawn = Progress(
            *columns,
            console=self._console(),
            redirect_stdout=redirect_stdout,
            redirect_stderr=False,
            transient=True,
            auto_refresh=False,  # the caller says when: no thread of its own
            expand=True,
        )
        self._drawn.add_task(text, total=None, says="")
        self._drawn.start()

    def draw_spinner(self, text: str) -> None:
        """Draw a text, a bar, a percentage and the time in one line that moves by itself; it stays after `stop`."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        self._drawn = Progress(*columns, TaskProgressColumn(), TimeElapsedColumn(), console=self._console())
        self._drawn.start()
        self._drawn.add_task(text, total=None)

    def draw_block(self) -> None:
        """Draw several lines, those of the last `show_block`; `stop` wipes them."""
        from rich.live import Live

        self._drawn = Live(console=self._console(), auto_refresh=False, transient=True)
        self._drawn.start()

    def move_bar(self, **changes: Any) -> None:
        """Change what the bar or the spinner shows: description, completed, total, says."""
        self._drawn.update(self._drawn.task_ids[0], **changes)

    def refresh(self) -> None:
        """Draw the bar anew."""
        self._drawn.refresh()

    def show_block(self, styled: Iterable[tuple[str, str]]) -> None:
        """Draw these texts, each in a style of rich's; lines that are too long are cut."""
        from rich.text import Text

        drawn = Text(no_wrap=True, overflow="crop")
        for text, style in styled:
            drawn.append(text, style)
        self._drawn.update(drawn, refresh=True)

    def stop(self) -> None:
        """End what is drawn, if anything is."""
        if self._drawn is not None:
            self._drawn.stop()

    def _console(self) -> Any:
        from rich.console import Console

        return Console(file=self._stream, highlight=False, markup=False)
