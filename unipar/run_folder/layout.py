"""Paths of the files that each rank writes to a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unipar.utils.address import Location, parse_location

PAGE_FILE_NAME = "report.html"
"""Name of the page beside results."""

CHECKPOINTS_OF_RUN = "checkpoints"
"""Name of the folder of checkpoints in a run folder."""


def heartbeat_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return run / f"rank-{rank}.beat"


def run_log_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's run log."""
    return run / f"rank-{rank}.jsonl"


def stdout_path(run: Path) -> Path:
    """Return the path of the copy of rank 0's standard output."""
    return run / "rank-0.out"


def error_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's error file."""
    return run / f"rank-{rank}.error.json"


def run_error_path(run: Path) -> Path:
    """Return the path of the error with which the run as a whole ended, written by the process that watches it."""
    return run / "error.json"


def stack_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's Python stacks, written when the rank crashes or hangs."""
    return run / f"rank-{rank}.stack"


def collectives_path(run: Path, rank: int) -> Path:
    """Return the path of what torch's flight recorder knew of a rank's collectives when the rank hung."""
    return run / f"rank-{rank}.collectives.json"


def trace_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's trace, for Perfetto."""
    return run / "trace" / f"rank-{rank}.json.gz"


def log_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return run / f"rank-{rank}.log"


def checkpoint_folder(run: Path, to: str | None) -> Location:
    """Return the folder in which a run's checkpoints are; `to` is its config's `checkpoint.to`.

    Below `to` each run has a folder of its own, whose name is in its launch.json.
    """
    if to is None:
        return run / CHECKPOINTS_OF_RUN
    own = read_launch_file(run).get("checkpoints")
    return parse_location(to) / own if own else parse_location(to)


def attempts_path(run: Path) -> Path:
    """Return the path of the file with config and launch of the run's earlier attempts, one a line."""
    return run / "attempts.jsonl"


def read_launch_file(run: Path) -> dict[str, Any]:
    """Return the contents of launch.json; empty for a run folder without it, as tests make them."""
    path = run / "launch.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def debugger_path(run: Path) -> Path:
    """Return the path of the mark by which a rank whose debugger starts asks its parent to stop drawing."""
    return run / ".debugger"


def debugging_path(run: Path) -> Path:
    """Return the path to which the parent renames that mark when it has."""
    return run / ".debugging"
