"""Overflows in fp16 on the emulated device: steps are skipped there, and the host learns of them where it logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice, EmulatedRun
from tests.support.softcuda.trainings.strategies import CODE, SIZES
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

STEPS = 10
OVERFLOWS = [1, 3, 4, 8]

TRAIN: dict[str, Any] = {
    "steps": STEPS,
    "precision": "fp16",
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "clip": 1.0,
    "schedule": {"name": "cosine", "warmup": 6},
}


def train(emulated: EmulatedDevice, folder: Path, strategy: str, log_every: int, **more: Any) -> EmulatedRun:
    """Train in two ranks, with overflows."""
    overflows = more.pop("overflows", OVERFLOWS)
    settings = {
        "task": {
            "use": f"{ROOT}/tests/support/softcuda/trainings/overflowing.py:OverflowingGPT",
            "args": {"overflows": overflows, **SIZES},
        },
        "device": "cuda",
        "batch": {"total": 8, "micro": 2},
        "parallel": {"data": 2},
        "train": {**TRAIN, **more},
        "log": {"every": log_every},
        "checkpoint": {"every": STEPS // 2},
        "out": str(folder / "run"),
    }
    return emulated.run(CODE.format(settings=json.dumps(settings), strategy=strategy), devices=2)


def state_of(folder: Path, step: int = STEPS) -> tuple[dict[str, bytes], dict[str, Any], list[int]]:
    """Return the bytes of a checkpoint, what its part counts, and the steps that are noted as skipped."""
    saved = folder / f"run/checkpoints/step-{step:08}"
    shards = {file.name: file.read_bytes() for file in sorted(saved.glob("shards/*"))}
    part = json.loads((saved / "state.json").read_text("utf-8"))["parts"]["model"]
    noted = [row["step"] for row in RunLog.read(run_log_path(folder / "run", 0)) if row["event"] == "skipped"]
    return shards, {"skipped": part["skipped"], **part["counters"]}, noted


def waits_of(run: EmulatedRun) -> set[str]:
    """Return what the hosts wait for in the steps between the first ones and the last, which are not logged."""
    found = [finding for finding in run.findings if finding.step in range(6, STEPS)]
    return {f"{f.text} in {f.where[0].rpartition(':')[0]}" for f in found if f.kind in ("wait", "unpinned")}


NONE: set[str] = set()


@pytest.mark.parametrize(
    ("strategy", "more", "waits"),
    [
        ("native/nothing", {"ema": {"decay": 0.9, "warmup": 2}}, NONE),
        pytest.param("native/parameters", {}, NONE, marks=pytest.mark.emulated),
        pytest.param("native/optimizer", {"ema": {"decay": 0.9}}, NONE, marks=pytest.mark.emulated),
        pytest.param("accelerate/parameters", {}, NONE, marks=pytest.mark.emulated),
        pytest.param(
            "deepspeed/nothing", {}, {"copy to the host in unipar/engines/loss_scale.py"}, marks=pytest.mark.emulated
        ),
        pytest.param(
            "native/nothing", {"optimizer": {"name": "sgd", "momentum": 0.9}}, NONE, marks=pytest.mark.emulated
        ),
        pytest.param(
            "native/nothing",
            {"ema": {"decay": 0.9, "every": 2}},
            {"item in engines/averages/engine.py"},
            marks=pytest.mark.emulated,
        ),
        pytest.param(
            "native/nothing",
            {"optimizer": {"name": "muon", "lr": 1e-2}},
            {"item in unipar/engines/update_guard.py"},
            marks=pytest.mark.emulated,
        ),
    ],
)
def test_skipped_steps_between_two_logged_ones(
    strategy: str, more: dict[str, Any], waits: set[str], emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """Weights, averages, rates and counts are those of a run whose host looks after every step, to the last bit."""
    often, seldom = tmp_path / "often", tmp_path / "seldom"
    looked = train(emulated, often, strategy, 1, **more)
    run = train(emulated, seldom, strategy, STEPS, **more)
    assert run.result, run.stderr
    assert run.result[-1] == looked.result[-1]
    shards, counts, noted = state_of(seldom)
    assert (shards, counts, noted) == state_of(often)
    assert state_of(seldom, STEPS // 2) == state_of(often, STEPS // 2)
    assert noted == OVERFLOWS
    assert counts["skipped"] == 4
    assert counts["loss_scale"] == 2.0**12
    assert run.texts("race") == []
    assert waits_of(run) == waits


@pytest.mark.emulated
def test_gradients_that_no_scale_saves(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The error comes where the host looks, here before a save, which is left out."""
    run = train(emulated, tmp_path, "native/nothing", 40, overflows=[*range(3, 31)], steps=40)
    assert run.result is None
    assert "gradients are not finite at any loss scale down to 0.000976562" in run.stderr
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved[-1] == "step-00000025"
    noted = [row["step"] for row in RunLog.read(run_log_path(tmp_path / "run", 0)) if row["event"] == "skipped"]
    assert noted == [*range(3, 31)]
