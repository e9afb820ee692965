"""A thousand kills of processes that save checkpoints: `make chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unipar.utils.table import format_table

pytestmark = pytest.mark.chaos

TRIALS, SEED = 1080, 15
LEFT = ("nothing else", "temporary", "trash")


def test_a_thousand_kills_leave_no_broken_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says who was killed, what was left beside published checkpoints, and how many of those were broken."""
    command = [sys.executable, "-m", "tests.support.checkpoint_kills", str(tmp_path / "run"), str(TRIALS), str(SEED)]
    played = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    rows = [
        (way, str(sum(left.values())), *(str(left.get(name, 0)) for name in LEFT))
        for way, left in played["left"].items()
    ]
    with capsys.disabled():
        header = (f"kill -9 while saving, seed {SEED}", "trials", "left: nothing else", "temporary", "trash")
        print("\n" + format_table(header, rows, right=(1, 2, 3, 4)))
        print(f"{TRIALS} kills in {played['seconds']:.0f} s, {played['published']} checkpoints published meanwhile")
        print(f"faults: {len(played['faults'])}")
    assert played["faults"] == []
    assert sum(int(row[1]) for row in rows) == TRIALS
