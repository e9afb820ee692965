"""The tutorial: its files are written, its commands run in its order, and each prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.transcript import check_shown, numberless, played

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text("utf-8")
BUG, ELSEWHERE, COSTS, NEXT = (
    f"\n## {title}\n"
    for title in ("A bug on purpose", "Resume in another strategy", "Cost of each strategy", "Next pages")
)
"""Headings: a second verification is before ELSEWHERE, and memory is recorded, in other processes, after COSTS."""


def losses(printed: str) -> dict[str, str]:
    """Return the loss of each step that a run printed, as printed."""
    return dict(re.findall(r"^step (\d+)/120  loss ([\d.]+)", printed, re.MULTILINE))


def shortened(page: str) -> str:
    """Return the page without the bug that is put in and taken out, and without what follows the runs."""
    before, _, rest = page.partition(BUG)
    return before + ELSEWHERE + rest.partition(ELSEWHERE)[2].partition(COSTS)[0]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["short", "whole"])
def test_the_tutorial(whole: bool, tmp_path: Path, forks: Forks) -> None:
    """What is shown is printed, numbers apart; every strategy's run prints the same losses, and all agree."""
    runs: list[dict[str, str]] = []
    page = PAGE.partition(NEXT)[0]
    for shown, printed in played(page if whole else shortened(page), tmp_path, forks):
        told = printed.replace(str(tmp_path), "/home/you/tutorial")
        check_shown(numberless(shown.output), numberless(told))
        if shown.command.startswith("unipar run ") and not shown.fails:
            runs.append(losses(printed))
        if shown.command.startswith("unipar verify"):
            assert "all 4 strategies agree with one process over 10 steps on 2 ranks" in printed
    one, two, deepspeed, four = runs
    assert list(one) == ["1", "41", "81", "120"]
    assert one == two == deepspeed
    assert list(four) == ["81", "120"]
    assert four.items() <= one.items()
