"""DeepSpeed's settings: each trains to the numbers of one process, or is refused where it would do nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.cases import FP32
from tests.conformance.inside import put_together
from tests.conformance.plain import plain
from tests.settings_inside import case_of
from tests.world import ROOT
from unipar.crew import Crew

Options = Mapping[str, Any]
Rows = list[dict[str, Any]]

SMALL = {"reduce": 500, "gather": 300}
TIGHT = {"reduce": 500, "prefetch": 100, "persistence": 0, "live": 700, "reuse": 50}

ROWS: Rows = [
    {"name": name, "cell": cell, "options": {"deepspeed": options}, **more}
    for name, cell, options, more in (
        ("zero-1, small buckets", "deepspeed/optimizer", SMALL, {}),
        ("zero-2, small buckets", "deepspeed/gradients", SMALL, {}),
        ("zero-3, everything small", "deepspeed/parameters", TIGHT, {}),
        ("zero-2, gradients where they are", "deepspeed/gradients", {"contiguous": False}, {}),
        ("zero-3, gradients where they are", "deepspeed/parameters", {"contiguous": False}, {}),
        ("zero-1, offloaded", "deepspeed/optimizer", {"offload_optimizer": "cpu", "cpu_adam": "torch"}, {}),
        ("zero-2, offloaded", "deepspeed/gradients", {"offload_optimizer": "cpu", "cpu_adam": "torch"}, {"hop": 3}),
        ("zero-3, offloaded", "deepspeed/parameters", {"offload_optimizer": "cpu", "cpu_adam": "torch"}, {"hop": 3}),
        (
            "zero-1, offloaded, four",
            "deepspeed/optimizer",
            {"offload_optimizer": "cpu", "cpu_adam": "torch"},
            {"accumulate": 4},
        ),
        (
            "zero-2, offloaded, four",
            "deepspeed/gradients",
            {"offload_optimizer": "cpu", "cpu_adam": "torch"},
            {"accumulate": 4, "train": {"clip": None}},
        ),
        (
            "zero-3, offloaded, four",
            "deepspeed/parameters",
            {"offload_optimizer": "cpu", "cpu_adam": "torch"},
            {"accumulate": 4},
        ),
    )
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return play(ROWS, tmp_path_factory.mktemp("settings"))


def play(rows: Rows, run: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows in one world of two; what each rank kept."""
    (run / "rows.json").write_text(json.dumps(rows), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Crew(run, 2, "tests.settings_inside:run", environment={"PYTHONPATH": path}, heartbeat=100.0) as crew:
        crew.wait()
    return {
        row["name"]: [torch.load(run / f"{i}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for i, row in enumerate(rows)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_agrees(row: dict[str, Any], played: dict[str, list[dict[str, Any]]]) -> None:
    """Losses, norms and parameters are those of one process."""
    agrees(row, played[row["name"]])


def agrees(row: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert [rank["message"] for rank in ranks if "error" in rank] == []
    one = plain(case_of(row), 2)
    losses = [sum(shares) for shares in zip(*(rank["loss"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(one.losses, abs=FP32.loss, rel=0)
    for rank in ranks:
        assert rank["norm"] == pytest.approx(one.norms, rel=FP32.norm)
    whole = put_together([p for rank in ranks for p in rank["pieces"]])
    weights = {name: t for (name, kind), t in whole.items() if kind == "weight"}
    assert set(weights) == set(one.params)
    assert FP32.params is not None
    assert max(float((t - one.params[n]).abs().max()) for n, t in weights.items()) <= FP32.params
