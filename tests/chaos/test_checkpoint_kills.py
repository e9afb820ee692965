"""A thousand kills of processes that save checkpoints: `make chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.object_store import object_store
from unipar.utils.table import format_table

pytestmark = pytest.mark.chaos

TRIALS, TRIALS_OVER_HTTP, SEED = 1080, 54, 15
LEFT = ("nothing else", "temporary", "trash")


def test_a_thousand_kills_leave_no_broken_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says who was killed, what was left beside published checkpoints, and how many of those were broken."""
    play(str(tmp_path / "run"), TRIALS, capsys)


def test_kills_in_uploads_leave_no_broken_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """The same over HTTP: what is left is an upload that did not end, which nobody takes for a checkpoint."""
    with object_store() as store:
        play(f"{store.address}/run", TRIALS_OVER_HTTP, capsys)


def play(place: str, trials: int, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.support.checkpoint_kills", place, str(trials), str(SEED)]
    played = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    rows = [
        (way, str(sum(left.values())), *(str(left.get(name, 0)) for name in LEFT))
        for way, left in played["left"].items()
    ]
    with capsys.disabled():
        header = (
            f"kill -9 while saving to {place.partition(':')[0] if '://' in place else 'a disk'}, seed {SEED}",
            "trials",
            "left: nothing else",
            "temporary",
            "trash",
        )
        print("\n" + format_table(header, rows, right=(1, 2, 3, 4)))
        print(f"{trials} kills in {played['seconds']:.0f} s, {played['published']} checkpoints published meanwhile")
        print(f"faults: {len(played['faults'])}")
    assert played["faults"] == []
    assert sum(int(row[1]) for row in rows) == trials
