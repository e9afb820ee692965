"""Worlds of new processes that measure something: what they are asked, and what they found."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from unipar.launcher.processes.group import WorkerGroup

ROOT = Path(__file__).parent.parent
_ASKED, _FOUND = "asked.json", "found.json"


def run_world(entry: str, size: int = 1, asked: Any = None) -> Any:
    """Run `entry` in a world of new processes, each with one thread; return what one of them gave `write_found`."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "backends")))
    with tempfile.TemporaryDirectory(prefix="unipar-bench-") as folder:
        run = Path(folder)
        (run / _ASKED).write_text(json.dumps(asked), encoding="utf-8")
        with WorkerGroup(run, size, entry, environment={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}) as group:
            group.wait()
        return json.loads((run / _FOUND).read_text("utf-8"))


def read_asked(run: Path) -> Any:
    """Return what the caller of `run_world` asked."""
    return json.loads((run / _ASKED).read_text("utf-8"))


def write_found(run: Path, found: Any) -> None:
    """Give the caller of `run_world` what was measured."""
    (run / _FOUND).write_text(json.dumps(found), encoding="utf-8")
