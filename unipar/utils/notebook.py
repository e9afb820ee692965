"""Output in a notebook: a line that is replaced while something runs, and results that are shown as their page."""

from __future__ import annotations

import html
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

FRAME = '<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 1px solid #8884"></iframe>'
"""A page inside a notebook's output, whose styles are its own."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@final
class ReplacedLine:
    """A line in a notebook's output that is replaced by each next one."""

    def __init__(self) -> None:
        self._display: Any = None

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        from IPython.display import display

        content = {"text/plain": text}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)


class ShownAsPage(ABC):
    """Base of results that a notebook shows as their page, and a prompt as their table."""

    @property
    @abstractmethod
    def page(self) -> Path:
        """Path of the page, which may not exist."""

    @abstractmethod
    def table(self, width: int = 80) -> str:
        """Return the results as text."""

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the result as it prints: IPython prefers a dataclass's own repr to a `_repr_pretty_` of its base."""
        return {"text/plain": str(self)}

    def _repr_html_(self) -> str | None:
        """Return the page in a frame, or None if there is none, so that the table is shown."""
        if not self.page.is_file():
            return None
        return FRAME.format(page=html.escape(self.page.read_text("utf-8")))
