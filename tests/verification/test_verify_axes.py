"""`unipar verify` of cells whose ranks share the work on the same samples: each is compared with its own split."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.forks import Forks

ROOT = Path(__file__).parents[2]
CELLS = ("toy/nothing", "toy/nothing+tensor2", "toy/nothing+pipeline2", "toy/nothing+context2")


def verified(forks: Forks, folder: Path, task: str, cells: tuple[str, ...], **args: Any) -> dict[str, Any]:
    """Verify a task on two ranks over five steps, with a backend that has all axes; return verify.json."""
    config = {
        "task": {"use": task, "args": args},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 16, "micro": 4},
        "train": {"steps": 20, "optimizer": {"name": "adamw", "lr": 1e-2, "decay": "matrices"}, "clip": 0.3},
        "out": str(folder / "out"),
    }
    (folder / "c.yaml").write_text(json.dumps(config), "utf-8")
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "toy"), str(ROOT)])
    words = [word for cell in cells for word in ("--cells", cell)]
    done = forks.unipar(["verify", str(folder / "c.yaml"), "--steps", "5", *words], {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out" / "verify" / "verify.json").read_text("utf-8"))


def test_each_cell_is_compared_with_its_own_number_of_shares(forks: Forks, tmp_path: Path) -> None:
    """Of 35 samples, 3 are left for the third batch: two ranks split it into other microbatches than one would."""
    said = verified(forks, tmp_path, "tests.conformance.tasks:Tokens", CELLS, count=35)
    assert [(row["cell"], row["outcome"], row["bits"]) for row in said["cells"]] == [
        (cell, "agrees", "shares") for cell in CELLS
    ]
    assert {name for name in said["one"] if name.startswith("a replay")} == {
        "a replay, share by share",
        "a replay, microbatch by microbatch",
        "a replay with 1 share, share by share",
        "a replay with 1 share, share by share, as configured, matrix products in 2 parts",
        "a replay with 1 share, share by share, as configured, sequences in 2 parts",
    }
    rows = {row["cell"]: row for row in said["cells"]}
    assert rows["toy/nothing"]["allowed"] == {}
    assert rows["toy/nothing+tensor2"]["allowed"]["norm"] != said["allowed"]["norm"]


def test_the_cut_of_a_batch_matters_by_cell(forks: Forks, tmp_path: Path) -> None:
    """With BatchNorm each cell is compared with one process that splits batches as that cell does."""
    said = verified(forks, tmp_path, "tests.conformance.tasks:Normed", CELLS[:2])
    assert [(row["outcome"], row["bits"]) for row in said["cells"]] == [("agrees", "shares"), ("agrees", "shares")]
    assert said["base"] == "a replay, share by share, as configured"
    assert [row["base"] for row in said["cells"]] == ["", "a replay with 1 share, share by share, as configured"]
    assert said["cut_dependence"]["kind"] == "batch statistics"
