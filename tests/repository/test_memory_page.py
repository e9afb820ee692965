"""docs/memory.md: the plan that it shows is the one that is printed."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.support.forks import Forks
from tests.support.transcript import blocks, check_shown, commands

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/memory.md").read_text("utf-8")


def test_the_plan(forks: Forks) -> None:
    """To the last figure, as a plan for a preset does not depend on this machine."""
    (shown, *_) = commands(next(block for block in blocks(PAGE) if block.language == "console"))
    program, *words = shlex.split(shown.command)
    assert (program, words[0]) == ("unipar", "plan")
    printed = forks.python(["-m", "unipar", *words], ROOT).stdout
    check_shown(shown.output.splitlines(), printed.splitlines())
