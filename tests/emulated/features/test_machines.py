"""Two machines of network namespaces, each with an emulated device of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.machine_launches import Job, reason_not_here
from tests.support.machine_runs import Started
from tests.support.machines.start import machines, reason_no_machines
from tests.support.matrix import CONFIG
from tests.support.programs import skip_because
from tests.support.softcuda import build
from tests.support.softcuda.activation import FOLDER
from tests.support.softcuda.emulation import emulated_environment
from tests.support.softcuda.processes import EmulatedDevice
from unipar.results.run_report import Report
from unipar.run_folder.layout import read_launch_file

pytestmark = [pytest.mark.emulated, skip_because(reason_no_machines())]


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        ("torchrun c10d", "native/parameters"),
        ("accelerate launch", "accelerate"),
        ("deepspeed", "deepspeed"),
        ("by hand", "native"),
    ],
)
def test_a_device_on_each_of_two_machines(
    launcher: str, backend: str, emulated: EmulatedDevice, tmp_path: Path
) -> None:
    """Both ranks call theirs cuda:0 and meet over its NCCL, with the losses of one process on the CPU."""
    del emulated  # it is built, or the test is skipped
    if why := reason_not_here(launcher):
        pytest.skip(why)
    shared = tmp_path / "shared"
    shutil.copytree(build.library_folder(), shared)
    variables = {**emulated_environment(devices=1), FOLDER: str(shared)}
    config = CONFIG.replace("device: cpu", "device: cuda")
    with (
        machines(2, tmp_path / "machines", share=[shared], ssh=launcher == "deepspeed") as made,
        Started(Job(made, (1, 1), variables), launcher, backend, tmp_path / "run", config=config) as run,
    ):
        outcome = run.wait()
        said = "".join(run.said_on(machine) for machine in made)
        folder = run.folder_on(made[0])
        assert outcome.code == 0, outcome.said + said
        assert outcome.losses[-1] == (12, pytest.approx(3.385748267173767, rel=1e-6))
        assert Report.read(folder).size == 2
        assert read_launch_file(folder)["settled"]["device"] == "cuda"
