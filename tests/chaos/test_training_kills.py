"""Fifty kills of real training under each backend, each of which goes on from what was saved: `make chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training_kills import STRATEGIES, VICTIMS
from unipar.utils.table import format_table

pytestmark = pytest.mark.chaos

KILLS, KILLS_OVER_HTTP, SEED = 50, 12, 15


@pytest.mark.parametrize(
    ("strategy", "where"), [*((strategy, ()) for strategy in STRATEGIES), ("native/parameters", ("s3",))]
)
def test_a_killed_run_goes_on(
    strategy: str, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No published checkpoint is broken, none is lost, and the losses are those of a run that nobody killed."""
    kills = KILLS_OVER_HTTP if where else KILLS
    command = [
        sys.executable,
        "-m",
        "tests.support.training_kills",
        str(tmp_path / "runs"),
        strategy,
        str(kills),
        str(SEED),
        *where,
    ]
    played = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    row = (strategy, *(str(played["kills"].get(victim, 0)) for victim in VICTIMS))
    row += tuple(str(played[key]) for key in ("too_early", "left", "published", "steps"))
    with capsys.disabled():
        header = (f"kill -9, seed {SEED}", *VICTIMS, "before the first", "in a save", "verified", "steps in the end")
        print("\n" + format_table(header, [row], right=tuple(range(1, len(row)))))
        print(f"{played['seconds']:.0f} s, faults: {len(played['faults'])}")
    assert played["faults"] == []
    assert sum(played["kills"].values()) == kills
