"""Runs that other launchers start on the emulated device, and which devices their ranks see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.launchers import environment, in_private_network, launch_command, reason_missing
from tests.support.programs import skip_because
from tests.support.slurm import cluster, reason_no_cluster
from tests.support.softcuda.emulation import ROOT, emulated_environment
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.profiles import A100, PROFILES
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, losses_of_run, write_config

GPUS = [A100.gpu_uuid(i) for i in range(2)]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("launcher", "backend", "precision", "flags"),
    [
        ("torchrun", "native", "fp32", []),
        ("accelerate launch", "accelerate", "fp32", []),
        ("accelerate launch", "accelerate", "fp16", ["--mixed_precision", "fp16"]),
        ("deepspeed", "deepspeed", "fp32", []),
    ],
)
def test_started_by(
    launcher: str, backend: str, precision: str, flags: list[str], emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """Two ranks on two devices, with the losses of ranks that unipar starts."""
    if why := reason_missing(launcher):
        pytest.skip(why)
    train = {**COMMAND_SETTINGS["train"], "precision": precision}
    ours = write_config(tmp_path / "ours", backend=backend, train=train)
    assert emulated.unipar(["run", ours]).returncode == 0
    config = write_config(tmp_path / "theirs", backend=backend, train=train, parallel={})
    words = launch_command(launcher, "unipar", "run", config)
    module = words.index("--module" if launcher == "deepspeed" else "-m")
    done = _run([*words[:module], *flags, *words[module:]], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of_run(tmp_path / "theirs") == losses_of_run(tmp_path / "ours")


def _run(words: list[str], folder: Path, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a launcher's command with an emulated device."""
    made, emulator = environment(folder), emulated_environment()
    made |= {**emulator, "PYTHONPATH": os.pathsep.join([emulator["PYTHONPATH"], made["PYTHONPATH"]]), **(more or {})}
    return subprocess.run(words, cwd=folder, env=made, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.emulated
def test_an_exported_pipeline_with_dropout(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Its script sends the device's random state from stage to stage, and has the losses of unipar's run there."""
    task = {"use": f"{ROOT}/tests/support/split_models.py:Kinds", "args": {"kind": "plain"}}
    config = write_config(tmp_path, task=task, parallel={"data": 1, "pipeline": 2})
    ours = emulated.unipar(["run", config])
    assert ours.returncode == 0, ours.stderr
    script = tmp_path / "script"
    made = emulated.unipar(["export", config, "--to", "torchrun", "--out", str(script)])
    assert made.returncode == 0, made.stderr
    done = _run(in_private_network([str(script / "run.sh")]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (script / "log.jsonl").read_text("utf-8").splitlines()]
    assert losses == pytest.approx(losses_of_run(tmp_path), rel=2e-6)


@pytest.mark.emulated
@skip_because(reason_no_cluster())
def test_started_by_srun(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Two tasks that see both devices, with the losses of ranks that unipar starts."""
    ours = write_config(tmp_path / "ours")
    assert emulated.unipar(["run", ours]).returncode == 0
    config = write_config(tmp_path / "theirs", parallel={})
    words = ["srun", "-n2", sys.executable, "-m", "unipar", "run", config]
    with cluster(tmp_path / "slurm") as slurm:
        done = _run(slurm.inside(words), tmp_path, slurm.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of_run(tmp_path / "theirs") == losses_of_run(tmp_path / "ours")


HOROVOD = (
    "horovod/nothing: device: cuda: this Horovod was built for tensors of the CPU alone, and the first step would "
    "never end; build it where CUDA's toolkit is (`unipar install horovod`), set device: cpu, or choose another backend"
)


def test_horovod_without_cuda_is_refused(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Its first step would never end; the sentence comes before a model is built."""
    pytest.importorskip("horovod.torch", reason="Horovod is not installed here")
    done = emulated.unipar(["run", write_config(tmp_path, backend="horovod")])
    assert done.returncode == 3, done.stderr
    assert HOROVOD in done.stderr


@pytest.mark.emulated
def test_horovodrun_without_cuda_is_refused(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The ranks of horovodrun say the same sentence, and none is left waiting."""
    del emulated  # it is built, or the test is skipped
    pytest.importorskip("horovod.torch", reason="Horovod is not installed here")
    if why := reason_missing("horovodrun"):
        pytest.skip(why)
    config = write_config(tmp_path, backend="horovod", parallel={})
    done = _run(launch_command("horovodrun", "unipar", "run", config), tmp_path)
    assert done.returncode != 0
    assert HOROVOD in done.stdout + done.stderr, done.stdout + done.stderr


INSTANCE = PROFILES["mig"].instance_uuid(0, 1)
ONE, NONE = "one GPU visible here", "no GPU visible here"


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("profile", "choice", "ranks", "said"),
    [
        ("a100", "1,0", 2, ""),
        ("a100", ",".join(reversed(GPUS)), 2, ""),
        ("a100", GPUS[1][:12], 1, ""),
        ("mig", INSTANCE, 1, ""),
        ("a100", "1", 2, ONE),
        ("a100", "0,7", 2, ONE),
        ("mig", INSTANCE, 2, ONE),
        ("a100", "", 2, NONE),
        ("a100", "7", 2, NONE),
        ("a100", "0,0", 2, NONE),
    ],
)
def test_visible_devices(
    profile: str, choice: str, ranks: int, said: str, emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """Indices, UUIDs, a slice of a GPU, none, one that is not there, one twice: a run on them, or a sentence."""
    settings = {**COMMAND_SETTINGS["train"], "steps": 2}
    config = write_config(tmp_path, parallel={"data": ranks}, train=settings)
    done = emulated.unipar(["run", config], profile, variables={"CUDA_VISIBLE_DEVICES": choice})
    assert done.returncode == (3 if said else 0), done.stderr
    if said:
        assert f"parallel.data: 2 ranks on cuda; {said} (CUDA_VISIBLE_DEVICES={choice}); " in done.stderr
