"""Rows that runs wrote into their run logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog


def rows_of(run: Path, *events: str, rank: int = 0) -> list[Mapping[str, Any]]:
    """Return a rank's rows of these events, or all its rows; none if it has no run log yet."""
    path = run_log_path(run, rank)
    rows = RunLog.read(path) if path.exists() else ()
    return [row for row in rows if not events or row["event"] in events]


def step_losses(run: Path) -> list[tuple[int, float]]:
    """Return each step that rank 0 logged, with its loss."""
    return [(row["step"], row["loss"]) for row in rows_of(run, "step")]
