"""Options of backends, each played in a strategy: one world for many, held against one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.inside import combine_pieces
from tests.conformance.plain import train_by_hand
from tests.conformance.tolerances import FP32, Tolerance
from tests.support.settings_inside import case_of
from tests.support.world import ROOT
from unipar.launcher.processes.group import WorkerGroup

Rows = list[dict[str, Any]]


def run_rows(rows: Rows, run: Path, size: int = 2) -> dict[str, list[dict[str, Any]]]:
    """All rows in one world; what each rank kept."""
    (run / "rows.json").write_text(json.dumps(rows), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(
        run, size, "tests.support.settings_inside:run", environment={"PYTHONPATH": path}, heartbeat=100.0
    ) as workers:
        workers.wait()
    return {
        row["name"]: [torch.load(run / f"{i}-{rank}.pt", weights_only=True) for rank in range(size)]
        for i, row in enumerate(rows)
    }


def assert_agrees(row: dict[str, Any], ranks: list[dict[str, Any]], near: Tolerance = FP32) -> None:
    assert [rank["message"] for rank in ranks if "error" in rank] == []
    one = train_by_hand(case_of(row), len(ranks))
    losses = [sum(shares) for shares in zip(*(rank["loss"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(one.losses, abs=near.loss, rel=0)
    for rank in ranks:
        assert rank["norm"] == pytest.approx(one.norms, rel=near.norm)
    whole = combine_pieces([p for rank in ranks for p in rank["pieces"]])
    weights = {name: t for (name, kind), t in whole.items() if kind == "weight"}
    assert set(weights) == set(one.params)
    if near.params is not None:
        assert max(float((t - one.params[n]).abs().max()) for n, t in weights.items()) <= near.params
