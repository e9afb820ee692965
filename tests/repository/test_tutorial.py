"""The tutorial: its files are written, its commands run in its order, and each prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.transcript import check_shown, numberless, played

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text("utf-8")
PROOF = "## What each costs\n"
"""Heading after which memory is recorded, in other processes than before."""


def losses(printed: str) -> dict[str, str]:
    """Return the loss of each step that a run printed, as printed."""
    return dict(re.findall(r"^step (\d+)/120  loss ([\d.]+)", printed, re.MULTILINE))


@pytest.mark.parametrize(
    "until", [PROOF, pytest.param("\n\n## Where next", marks=pytest.mark.sweep)], ids=["without compare", "whole"]
)
def test_the_tutorial(until: str, tmp_path: Path, forks: Forks) -> None:
    """What is shown is printed, numbers apart; the runs of every cell print the same losses, and all cells agree."""
    page, _, _ = PAGE.partition(until)
    runs: list[dict[str, str]] = []
    for shown, printed in played(page, tmp_path, forks):
        told = printed.replace(str(tmp_path), "/home/you/tutorial")
        check_shown(numberless(shown.output), numberless(told))
        if shown.command.startswith("unipar run") and not shown.fails:
            runs.append(losses(printed))
        if shown.command.startswith("unipar verify"):
            assert "all 4 cells agree with one process over 10 steps on 2 ranks" in printed
    one, two, deepspeed, four = runs
    assert list(one) == ["1", "41", "81", "120"]
    assert one == two == deepspeed
    assert list(four) == ["81", "120"]
    assert four.items() <= one.items()
