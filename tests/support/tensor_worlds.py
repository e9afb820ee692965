"""Worlds whose ranks compare blocks that are cut over them with the whole blocks (tensor_inside.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.world import ROOT
from unipar.launcher.processes.group import WorkerGroup

NEAR = 1e-12
"""How far a gradient may be off in fp64, in lengths of the whole one's."""


def said_in_world(folder: Path, ranks: int, kind: str) -> list[dict[str, Any]]:
    """Return what the ranks of a world say of the blocks of this kind."""
    (folder / kind).touch()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(folder, ranks, "tests.support.tensor_inside:run", environment={"PYTHONPATH": path}) as workers:
        workers.wait()
    return [json.loads((folder / f"said-{rank}.json").read_text("utf-8")) for rank in range(ranks)]
