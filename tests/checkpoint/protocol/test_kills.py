"""Processes that are killed while they save: published checkpoints stay whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("protocol", ["", pytest.param("file://", marks=pytest.mark.sweep)])
def test_kills_leave_no_broken_checkpoint(tmp_path: Path, protocol: str) -> None:
    """Forty-five kills of one rank or all of three; `make chaos` plays a thousand, and some over HTTP."""
    place = f"{protocol}{tmp_path}/run"
    command = [sys.executable, "-m", "tests.support.checkpoint_kills", place, "45", "3"]
    played = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    assert played["faults"] == []
    left = [sum(kinds.values()) for kinds in played["left"].values()]
    assert sum(left) == 45
    assert played["published"] > 25
    assert sum(kinds.get("temporary", 0) for kinds in played["left"].values()) > 5
