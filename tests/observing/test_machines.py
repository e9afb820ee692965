"""Commands that are observed on two machines, which share a folder for the results or share nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine_launches import PORT, Job, reason_not_here
from tests.support.machines.slurm import slurm_over
from tests.support.machines.start import machines, reason_no_machines
from tests.support.programs import skip_because
from tests.support.slurm import reason_no_cluster
from unipar.results.observation import Observation

pytestmark = skip_because(reason_no_machines())

SCRIPT = """
import os
for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
    os.environ.setdefault(name, os.environ.get(slurm, ""))
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(7):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
MISSING = (
    "note: 1 of 2 ranks wrote nothing into this folder (rank {}): if they ran on a machine that does not share it, "
    "give --out a folder that all share, or copy their rank-* files here and compare all by `unipar observe --from DIR`"
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Generator[Job]:
    """Two machines with a rank each, in a Slurm cluster if there can be one."""
    with ExitStack() as stack:
        made = stack.enter_context(machines(2, tmp_path_factory.mktemp("machines"), share=[shared]))
        variables = {} if reason_no_cluster() else stack.enter_context(slurm_over(made))
        address = {"MASTER_ADDR": made[0].address, "MASTER_PORT": str(PORT + 1)}
        yield Job(made, (1, 1), {**variables, **address})


def observe(job: Job, launcher: str, out: str, logs: Path) -> list[str]:
    """Observe the script on both machines, and return what each command printed; `out`: folder for the results."""
    if why := reason_not_here(launcher):
        pytest.skip(why)
    started: list[tuple[Any, Path]] = []
    for machine in job.machines:
        machine.path("/tmp/train.py").write_text(SCRIPT, "utf-8")
    for machine, words in job.commands(launcher, "train"):
        observed = [sys.executable, "-m", "unipar", "observe", "--out", out, "--", *words]
        log = logs / f"{machine.name}.log"
        started.append((machine.start(observed, log, env={**job.env, "COLUMNS": "1000"}), log))
    for process, log in started:
        assert process.wait(timeout=120) == 0, log.read_text("utf-8")
    return [log.read_text("utf-8") for _, log in started]


@pytest.mark.parametrize("launcher", [pytest.param("torchrun static", marks=pytest.mark.sweep), "srun"])
def test_a_folder_that_machines_share(launcher: str, job: Job, shared: Path, tmp_path: Path) -> None:
    """All ranks are compared, wherever they ran."""
    out = shared / launcher.replace(" ", "-")
    for said in observe(job, launcher, str(out), tmp_path):
        assert "no fault was found; compared: initial weights, weights and states, gradients" in said
        assert "wrote nothing" not in said
    seen = Observation.read(out)
    assert [(rank.rank, rank.size, rank.host, rank.steps) for rank in seen.ranks] == [
        (0, 2, "node1", 7), (1, 2, "node2", 7)
    ]  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun static", pytest.param("srun", marks=pytest.mark.sweep)])
def test_machines_that_share_nothing(launcher: str, job: Job, tmp_path: Path) -> None:
    """Each has its own ranks, and says which are missing; with their files in one folder, all are compared."""
    out = f"/tmp/{launcher.replace(' ', '-')}"
    for number, said in enumerate(observe(job, launcher, out, tmp_path)):
        assert MISSING.format(1 - number) in said
    here, there = (machine.path(out) for machine in job.machines)
    for file in there.glob("rank-1.*"):
        shutil.copy(file, here)
    again = job.machines[0].run([sys.executable, "-m", "unipar", "observe", "--from", out], env=job.env)
    assert "no fault was found; compared: initial weights, weights and states," in again.stderr
    assert "wrote nothing" not in again.stderr
