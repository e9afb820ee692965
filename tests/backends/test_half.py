"""fp16 with loss scaling: the real libraries on two ranks of the CPU, held against one process."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.half_inside import BAD, ENTRY, Row
from tests.support.imports import ASKED, LEAST, STEPS, YAML, ds, said, yaml
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.launcher.processes.group import WorkerGroup

pytestmark = pytest.mark.forked

FP64 = {"clip": {"max": 0.3, "norm": "fp64"}}
ZERO = {"accelerate": {"through": "deepspeed"}}
WORLDS = {
    "horovod": (Row("horovod/nothing"),),
    "accelerate": (Row("accelerate/nothing"), Row("accelerate/gradients"), Row("accelerate/parameters")),
    "deepspeed": (
        Row("deepspeed/nothing"),
        Row("deepspeed/optimizer"),
        Row("deepspeed/gradients"),
        Row("deepspeed/parameters"),
        Row("deepspeed/nothing", train=FP64),
        Row("deepspeed/optimizer", train=FP64),
        Row("deepspeed/parameters", train=FP64),
        Row("deepspeed/gradients", train={"clip": None}),
        Row("deepspeed/gradients", options={"deepspeed": {"offload_optimizer": "cpu", "cpu_adam": "torch"}}),
        Row("deepspeed/parameters", options={"deepspeed": {"offload_optimizer": "cpu", "cpu_adam": "torch"}}),
    ),
    "zero": tuple(Row(f"accelerate/{shard}+zero") for shard in ("optimizer", "gradients", "parameters")),
}


def _play(rows: tuple[Row, ...], run: Path, size: int) -> list[list[dict[str, Any]]]:
    run.mkdir()
    (run / "rows.json").write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
    with WorkerGroup(run, size, ENTRY, environment=PYTHONPATH_VARIABLE, heartbeat=100.0) as workers:
        workers.wait()
    return [[torch.load(run / f"{i}-{r}.pt", weights_only=True) for r in range(size)] for i in range(len(rows))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process, by its clip."""
    trains = ({}, FP64, {"clip": None})
    rows = tuple(Row("single", train=train) for train in trains)
    played = _play(rows, tmp_path_factory.mktemp("half") / "single", 1)
    return {json.dumps(row.train): result[0] for row, result in zip(rows, played, strict=True)}


@pytest.mark.parametrize("name", WORLDS)
def test_fp16(name: str, alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Losses and norms are those of one process; one rank's overflow is left out by all, and the schedule waits."""
    rows = WORLDS[name]
    for row, ranks in zip(rows, _play(rows, tmp_path / name, 2), strict=True):
        one = alone[json.dumps(row.train)]
        losses = [sum(shares) for shares in zip(*(rank["loss"] for rank in ranks), strict=True)]
        assert losses == pytest.approx(one["loss"], abs=2e-6, rel=0), row
        moved = [any(step) for step in zip(*(rank["moved"] for rank in ranks), strict=True)]
        assert moved == [True, True, False, True, True, True], row
        for rank in ranks:
            assert rank["scales"] == [2.0**16] * (BAD - 1) + [2.0**15] * 4, row
            assert not math.isfinite(rank["norm"].pop(BAD - 1)), row
            good = [norm for norm in one["norm"] if math.isfinite(norm)]
            assert rank["norm"] == pytest.approx(good, rel=1e-6), row
        assert ranks[0]["skipped"] == [BAD], row
        rates = [[x * 1e-2, x * 3e-3] for x in (0.2, 0.4, 0.6, 0.6, 0.8, 1.0)]  # of the task's two groups
        assert ranks[0]["rates"] == [pytest.approx(pair) for pair in rates], row


def test_other_libraries_files(tmp_path: Path) -> None:
    """Their fp16 keeps fp16 parameters, except under DDP: the note says what it means in unipar."""
    fsdp = YAML.replace("MULTI_GPU", "FSDP").replace("bf16\n", "fp16\n", 1)
    for made, comment in (
        (
            ds(tmp_path, {**LEAST, "fp16": {"enabled": True}}, "device=cuda", STEPS),
            "# fp16.enabled: autocast over fp32",
        ),
        (yaml(tmp_path, fsdp + "fsdp_config: {fsdp_version: 2}\n", *ASKED), "# fp16 under FSDP: autocast over fp32"),
    ):
        assert said(made)["train"]["precision"] == "fp16"
        assert comment in made.text
