"""Limits of the emulated device's memory: what a run says in each phase, and the microbatch that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, write_config
from tests.support.softcuda.trainings.strategies import SIZES
from unipar.run_folder.layout import read_launch_file

PLANNED = """
import unipar
(row,) = unipar.plan({config!r}, strategies=[{strategy!r}], worlds=[2]).rows
result = max(phase.peak - phase.held["runtime"] for phase in row.phases)
"""
"""The planned peak without CUDA's context and NCCL's buffers, which an emulated device has not."""


@pytest.mark.parametrize(
    "way", [pytest.param("backward"), *(pytest.param(way, marks=pytest.mark.emulated) for way in ("forward", "update"))]
)
def test_out_of_memory_in_a_phase(way: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The sentence names the phase and the step, the bytes that were asked for, and the largest part of the memory."""
    task = {
        "use": f"{ROOT}/tests/support/softcuda/trainings/greedy.py:Greedy",
        "args": {"way": way, **SIZES},
    }
    train = {"steps": 2, "clip": 1.0}
    done = emulated.unipar(["run", write_config(tmp_path, task=task, train=train)])
    assert done.returncode == 1
    sentence = f" ran out of memory in the {way} of step 1: 4096 GiB more were requested, about 80 GiB were available; "
    assert sentence in done.stderr, done.stderr
    assert "the largest part was " in done.stderr


@pytest.mark.emulated
def test_out_of_memory_during_set_up(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A model that is larger than the device."""
    done = emulated.unipar(["run", write_config(tmp_path)], memory=50_000)
    assert done.returncode == 1
    assert " ran out of memory during set-up: " in done.stderr, done.stderr


@pytest.mark.emulated
@pytest.mark.parametrize(
    "strategy", ["native/nothing", "native/parameters", "deepspeed/parameters", "accelerate/gradients"]
)
def test_a_run_needs_what_the_plan_says(strategy: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """It ends in 5 % more memory than the planned peak, and runs out of memory in 5 % less."""
    backend, shard = strategy.split("/")
    task = {**COMMAND_SETTINGS["task"], "args": {"layers": 4, "width": 128, "heads": 2, "context": 32}}
    config = write_config(tmp_path, task=task, backend=backend, parallel={"data": 2, "shard": shard})
    planned = emulated.run(PLANNED.format(config=config, strategy=strategy)).result
    done = emulated.unipar(["run", config], memory=int(1.05 * planned))
    assert done.returncode == 0, done.stderr
    done = emulated.unipar(["run", config, "--overwrite"], memory=int(0.95 * planned))
    assert done.returncode == 1
    assert " ran out of memory " in done.stderr, done.stderr


@pytest.mark.emulated
@pytest.mark.parametrize(("memory", "micro"), [(80 * 2**30, 4), (850_000, 2)])
def test_the_largest_microbatch_that_fits(memory: int, micro: int, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """`micro: auto` is tried on the device: all of a rank's part, or as much of it as there is memory for."""
    config = write_config(tmp_path, batch={"total": 8, "micro": "auto"}, train=COMMAND_SETTINGS["train"])
    done = emulated.unipar(["run", config], memory=memory)
    assert done.returncode == 0, done.stderr
    assert read_launch_file(tmp_path / "run")["micro"]["micro"] == micro


def test_a_trial_keeps_its_limit(emulated: EmulatedDevice) -> None:
    """A trial of `micro: auto` counts the memory from its begin on, and may use no more than it is given."""
    run = emulated.run("""
import torch
from unipar.launcher.micro_batch.trial_worker import _Limit
device = torch.device("cuda:0")
torch.empty(2**25, device=device)
torch.cuda.empty_cache()
limit = _Limit(2**24, shared_by=1)
limit.begin(device)
kept = torch.empty(2**20, device=device)
try:
    result = torch.empty(2**24, device=device).numel()
except torch.OutOfMemoryError:
    result = [2**22 <= limit.look() < 2**24]
""")
    assert run.result == [True], run.stderr
