"""Commands on the emulated device: what a user meets on a machine with GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, losses_of_run, write_config


def test_too_few_devices(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """More ranks than GPUs are refused before a process starts."""
    done = emulated.unipar(["run", write_config(tmp_path, parallel={"data": 4})])
    assert done.returncode == 3
    assert "parallel.data: 4 ranks on cuda; 2 GPUs visible here; lower it, set device: cpu" in done.stderr


def test_device_auto(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """`device: auto` and `data: auto` take all devices."""
    done = emulated.unipar(["run", write_config(tmp_path, device="auto", parallel={"data": "auto"})], devices=2)
    assert done.returncode == 0, done.stderr
    start = json.loads((tmp_path / "run/rank-1.jsonl").read_text("utf-8").splitlines()[0])
    assert start["size"] == 2
    assert '"device": "cuda"' in (tmp_path / "run/launch.json").read_text("utf-8")


def test_out_of_memory(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A device that is too small ends the run with the phase and the largest part of the memory."""
    done = emulated.unipar(["run", write_config(tmp_path)], memory=600_000)
    assert done.returncode == 1
    assert "ran out of memory in the " in done.stderr, done.stderr
    assert "; the largest part was " in done.stderr


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_driver_too_old_for_torch(device: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The driver counts GPUs that torch cannot use: the run ends with torch's reason, and never trains on the CPU."""
    done = emulated.unipar(["run", write_config(tmp_path, device=device)], "old-driver")
    assert done.returncode == 3
    assert "native/nothing: device: cuda: torch cannot use it on rank " in done.stderr
    assert "The NVIDIA driver on your system is too old" in done.stderr
    assert "set device: cpu" in done.stderr


@pytest.mark.parametrize(
    ("profile", "ranks"), [("no-count", 2), ("mig", 1), pytest.param("no-nvml", 2, marks=pytest.mark.emulated)]
)
def test_torch_is_asked_for_devices_that_nvml_does_not_tell(
    profile: str, ranks: int, emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """`device: auto` is one decision: of the parent, with torch's own count where the driver is silent."""
    done = emulated.unipar(["run", write_config(tmp_path, device="auto", parallel={"data": "auto"})], profile)
    assert done.returncode == 0, done.stderr
    settled = json.loads((tmp_path / "run/launch.json").read_text("utf-8"))["settled"]
    assert (settled["device"], settled["sizes"]["ranks"]) == ("cuda", ranks)


def test_parameters_offloaded_to_the_host(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """FSDP2 keeps its shards in host memory, and trains to the losses of shards on the device."""
    shard = {"data": 2, "shard": "parameters"}
    losses: list[list[float]] = []
    for place in ("none", "parameters"):
        folder = tmp_path / place
        done = emulated.unipar(["run", write_config(folder, parallel=shard, model={"offload": place})])
        assert done.returncode == 0, done.stderr
        losses.append(losses_of_run(folder))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


OWN_DEVICE = """
import json, os
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]{choice}
import unipar
from unipar.config import Config
report = unipar.launch(Config.model_validate(json.loads({settings!r})))
result = [loss for _, loss in report.losses]
"""


def test_each_rank_sees_a_device_of_its_own(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """As Slurm's --gpus-per-task shows them: both ranks call theirs cuda:0, and train as ranks that see both."""
    settings = json.dumps({**COMMAND_SETTINGS, "out": str(tmp_path / "run")})
    runs = emulated.ranks(OWN_DEVICE.format(settings=settings, choice=""))
    assert [run.code for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].result == runs[1].result
    assert len(runs[0].result) == 6


def test_two_ranks_see_the_same_device(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The ranks compare what they see when they meet, before NCCL can hang."""
    settings = json.dumps({**COMMAND_SETTINGS, "out": str(tmp_path / "run")})
    runs = emulated.ranks(OWN_DEVICE.format(settings=settings, choice=" and '0'"))
    sentence = (
        "ranks 0 and 1 are on one NVIDIA A100-SXM4-80GB: start no more processes on a machine than it has devices, "
        "or let them share one with device: cuda:0"
    )
    assert [sentence in run.error for run in runs] == [True, True], [run.stderr for run in runs]


@pytest.mark.emulated
def test_verify_where_a_count_starts_cuda(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Worlds of a verification on a device are new interpreters, as CUDA does not survive a fork."""
    done = emulated.unipar(
        ["verify", write_config(tmp_path), "--strategies", "native/nothing", "--steps", "2"], "no-count"
    )
    assert done.returncode == 0, done.stderr
    assert "native/nothing agrees with one process" in done.stdout


@pytest.mark.parametrize("first", ["cuda", pytest.param("cpu", marks=pytest.mark.emulated)])
def test_resumed_on_the_other_device(first: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A checkpoint written on the device goes on on the CPU, and back, to the losses of one run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    saving: dict[str, Any] = {"checkpoint": {"every": 3}}
    assert emulated.unipar(["run", write_config(whole, device="cpu", **saving)]).returncode == 0
    begun = write_config(parts, device=first, **saving)
    assert emulated.unipar(["run", begun, "--set", "train.steps=3"]).returncode == 0
    other = "cpu" if first == "cuda" else "cuda"
    done = emulated.unipar(["run", begun, "--resume", "--set", f"device={other}", "--set", "train.steps=6"])
    assert done.returncode == 0, done.stderr
    wanted = losses_of_run(whole)
    assert losses_of_run(parts)[-3:] == pytest.approx(wanted[3:], abs=1e-5)


@pytest.mark.emulated
def test_verify(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Strategies agree with one process on the device, bit for bit with a replay."""
    strategies = {"strategies": ["native/nothing", "native/parameters", "deepspeed/parameters"]}
    done = emulated.unipar(["verify", write_config(tmp_path, compare=strategies)])
    assert done.returncode == 0, done.stderr
    assert "all 3 strategies agree with one process over " in done.stdout
    assert done.stdout.count("agrees bit for bit") == 3


@pytest.mark.emulated
def test_verify_goes_on_from_a_checkpoint(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Each library loads what native/nothing has saved from the device, and agrees with an uninterrupted process."""
    strategies = ["native/nothing", "native/parameters", "deepspeed/parameters"]
    done = emulated.unipar(["verify", write_config(tmp_path, compare={"strategies": strategies}), "--resume"])
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "run/verify/verify.json").read_text("utf-8"))
    assert [(row["strategy"], row["outcome"]) for row in verdicts["strategies"]] == [
        (strategy, "agrees") for strategy in strategies
    ]
    assert verdicts["remarks"][0].startswith(
        "every strategy goes on from the state that native/nothing saved after step 3"
    )


@pytest.mark.emulated
def test_compare(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The plan's peak is within 2 % of that which the allocator has counted, and no byte is without a name."""
    strategies = {"strategies": ["native/nothing", "native/parameters", "deepspeed/parameters"], "repeat": 1}
    train = {**COMMAND_SETTINGS["train"], "steps": 13}
    done = emulated.unipar(["compare", write_config(tmp_path, compare=strategies, train=train), "--details"])
    assert done.returncode == 0, done.stderr
    within = done.stdout.partition("predicted peaks of 4 strategies are within ")[2].partition(" %")[0]
    assert float(within) < 2
