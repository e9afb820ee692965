"""Runs that other launchers start on the emulated device, and which devices their ranks see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.launchers import environment, launch_command, reason_missing
from tests.support.programs import skip_because
from tests.support.slurm import cluster, reason_no_cluster
from tests.support.softcuda.emulation import emulated_environment
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.profiles import A100, PROFILES
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, losses_of_run, write_config

GPUS = [A100.gpu_uuid(i) for i in range(2)]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("launcher", "backend"), [("torchrun", "native"), ("accelerate launch", "accelerate"), ("deepspeed", "deepspeed")]
)
def test_started_by(launcher: str, backend: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Two ranks on two devices, with the losses of ranks that unipar starts."""
    if why := reason_missing(launcher):
        pytest.skip(why)
    ours = write_config(tmp_path / "ours", backend=backend)
    assert emulated.unipar(["run", ours]).returncode == 0
    config = write_config(tmp_path / "theirs", backend=backend, parallel={})
    done = _run(launch_command(launcher, "unipar", "run", config), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of_run(tmp_path / "theirs") == losses_of_run(tmp_path / "ours")


def _run(words: list[str], folder: Path, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a launcher's command with an emulated device."""
    made, emulator = environment(folder), emulated_environment()
    made |= {**emulator, "PYTHONPATH": os.pathsep.join([emulator["PYTHONPATH"], made["PYTHONPATH"]]), **(more or {})}
    return subprocess.run(words, cwd=folder, env=made, capture_output=True, text=True, check=False, timeout=200)


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
