"""Checkpoints of the emulated device: written while training goes on, gone on from after a kill, in fp16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, losses_of_run, write_config
from tests.support.softcuda.trainings.strategies import SIZES
from unipar.checkpoint.protocol.verifying import verify_checkpoint
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

SAVING: dict[str, Any] = {"checkpoint": {"every": 3}}


def shards_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all shards that a run has saved, by step and rank."""
    saved = folder / "run/checkpoints"
    return {str(file.relative_to(saved)): file.read_bytes() for file in sorted(saved.glob("*/shards/*"))}


@pytest.mark.parametrize(
    ("shard", "files"), [pytest.param("nothing", 2), pytest.param("parameters", 4, marks=pytest.mark.emulated)]
)
def test_an_asynchronous_checkpoint_has_the_same_bytes(
    shard: str, files: int, emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """A copy made while the device still works equals, byte for byte, that of a run that waits."""
    saved: list[dict[str, bytes]] = []
    for wanted in (True, False):
        folder = tmp_path / str(wanted)
        config = write_config(folder, parallel={"data": 2, "shard": shard}, checkpoint={"every": 3, "async": wanted})
        done = emulated.unipar(["run", config])
        assert done.returncode == 0, done.stderr
        saved.append(shards_of(folder))
    assert len(saved[0]) == files
    assert saved[0] == saved[1]


@pytest.mark.emulated
@pytest.mark.parametrize("first", ["cuda", "cpu"])
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_killed_and_resumed_on_the_other_device(
    first: str, shard: str, emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """A rank is killed in step 5; from the checkpoint of step 3 the run goes on on the other device."""
    saved = tmp_path / "killed run/run/checkpoints/step-00000003"
    task = {
        "use": f"{ROOT}/tests/support/softcuda/trainings/killed.py:KilledOnce",
        "args": {"killed": str(tmp_path / "killed"), "saved": str(saved), **SIZES},
    }
    parallel = {"data": 2, "shard": shard}
    whole = write_config(tmp_path / "whole", device="cpu", parallel=parallel)
    assert emulated.unipar(["run", whole]).returncode == 0
    config = write_config(tmp_path / "killed run", task=task, device=first, parallel=parallel, **SAVING)
    done = emulated.unipar(["run", config])
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr
    other = {"cuda": "cpu", "cpu": "cuda"}[first]
    done = emulated.unipar(["run", config, "--resume", "--set", f"device={other}"])
    assert done.returncode == 0, done.stderr
    wanted = losses_of_run(tmp_path / "whole")
    assert losses_of_run(tmp_path / "killed run")[-3:] == pytest.approx(wanted[3:], abs=5e-7)


@pytest.mark.emulated
def test_the_loss_scale_goes_on(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A run in fp16 that stops and goes on has the losses and the scale of one that does not, to the last bit."""
    train = {**COMMAND_SETTINGS["train"], "precision": "fp16"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert emulated.unipar(["run", write_config(whole, train=train, **SAVING)]).returncode == 0
    begun = write_config(parts, train=train, **SAVING)
    assert emulated.unipar(["run", begun, "--set", "train.steps=3"]).returncode == 0
    done = emulated.unipar(["run", begun, "--resume", "--set", "train.steps=6"])
    assert done.returncode == 0, done.stderr
    assert losses_of_run(parts) == losses_of_run(whole)
    (counters,) = {counters_of(folder) for folder in (whole, parts)}
    assert json.loads(counters) == {"finite_steps": 6.0, "loss_scale": 65536.0}


def counters_of(folder: Path) -> str:
    """Return the counters of fp16's scale in the last checkpoint of a run."""
    state = json.loads((folder / "run/checkpoints/step-00000006/state.json").read_text("utf-8"))
    (part,) = state["parts"].values()
    return json.dumps({name: part["counters"][name] for name in ("finite_steps", "loss_scale")})


@pytest.mark.emulated
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_frozen_weights_are_compared_on_either_device(first: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """They are saved once; no save takes them for changed, on the device of the first save or on the other one."""
    sizes = {"layers": 2, "width": 16, "heads": 2, "context": 8}
    task = {"use": f"{ROOT}/tests/support/frozen_task.py:Tuned", "args": sizes}
    saving = {"every": 2, "keep": 9, "frozen": "reference"}
    parallel = {"data": 2, "shard": "parameters"}
    config = write_config(tmp_path, task=task, device=first, parallel=parallel, checkpoint=saving)
    done = emulated.unipar(["run", config])
    assert done.returncode == 0, done.stderr
    other = {"cuda": "cpu", "cpu": "cuda"}[first]
    done = emulated.unipar(["run", config, "--resume", "--set", f"device={other}", "--set", "train.steps=10"])
    assert done.returncode == 0, done.stderr
    rows = [row for row in RunLog.read(run_log_path(tmp_path / "run", 0)) if row["event"] == "checkpoint"]
    assert [(row["step"], row["remarks"]) for row in rows] == [(step, []) for step in (2, 4, 6, 8, 10)]
    assert len(list((tmp_path / "run/checkpoints").glob("frozen-*"))) == 1
    verify_checkpoint(tmp_path / "run/checkpoints/step-00000010")
