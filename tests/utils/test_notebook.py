"""Results and progress outside of a notebook; in a real kernel they are tested by tests/launcher/test_notebook.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typing_extensions import override

from unipar.utils.notebook import ShownAsPage, in_notebook
from unipar.utils.terminal import Terminal


class Result(ShownAsPage):
    def __init__(self, page: Path) -> None:
        self._page = page

    @property
    @override
    def page(self) -> Path:
        return self._page

    @override
    def table(self, width: int = 80) -> str:
        return "a table"

    @override
    def __str__(self) -> str:
        return self.table()


def shown_by_ipython(result: Result) -> dict[str, str]:
    """Return what IPython would send to a notebook, by its type."""
    from IPython.core.formatters import DisplayFormatter

    return DisplayFormatter().format(result)[0]


def test_a_page_is_shown_in_a_frame(tmp_path: Path) -> None:
    """Its quotation marks are escaped, since it is an attribute; without a page there is the table alone."""
    result = Result(tmp_path / "report.html")
    assert shown_by_ipython(result) == {"text/plain": "a table"}
    result.page.write_text('<p class="x">1 &lt; 2</p>', "utf-8")
    assert shown_by_ipython(result) == {
        "text/plain": "a table",
        "text/html": '<iframe srcdoc="&lt;p class=&quot;x&quot;&gt;1 &amp;lt; 2&lt;/p&gt;" '
        'style="width: 100%; height: 640px; border: 1px solid #8884"></iframe>',
    }


def test_progress_is_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """None replaces another one in a pipe."""
    assert not in_notebook()
    terminal = Terminal(sys.stderr)
    terminal.progress_line("step 1")
    terminal.progress_line("step 2")
    assert capsys.readouterr().err == "step 1\nstep 2\n"
