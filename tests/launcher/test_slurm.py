"""A Slurm cluster of one machine: what is a rank in it, and what is not. `make matrix` plays the backends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.foreign_launch import CONFIG
from tests.support.launchers import LAUNCH_COMMANDS, environment
from tests.support.programs import skip_because
from tests.support.slurm import Slurm, cluster, reason_no_cluster
from unipar.results.run_report import Report

pytestmark = [pytest.mark.slow, skip_because(reason_no_cluster())]

UNIPAR = [sys.executable, "-m", "unipar", "run", "x.yaml"]
TWO = [*UNIPAR, "--set", "parallel.data=2"]
TORCHRUN = [*LAUNCH_COMMANDS["torchrun"], "unipar", "run", "x.yaml"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm") / "slurm") as made:
        yield made


def run(slurm: Slurm, words: list[str], folder: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "x.yaml").write_text(CONFIG + more, encoding="utf-8")
    return subprocess.run(
        slurm.inside(words),
        cwd=folder,
        env={**environment(folder), **slurm.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def batch(words: list[str], folder: Path) -> list[str]:
    """The same in a batch script, until it has ended."""
    (folder / "job").write_text("#!/bin/sh\nexec " + " ".join(words) + "\n", encoding="utf-8")
    return ["sbatch", "--ntasks", "2", "--wait", "--quiet", "--output", "said", "job"]


def ours(run: Path) -> bool:
    """Whether the ranks were started by unipar: then they have logs of their own."""
    return (run / "rank-0.log").exists()


@pytest.mark.parametrize(
    ("words", "batched", "size", "by_us"),
    [
        (["srun", "-n2", *UNIPAR], False, 2, False),
        (["srun", "-n2", *UNIPAR], True, 2, False),
        (["srun", "-n2", "sh", "-c", f"'{' '.join(UNIPAR)}; exit $?'"], True, 2, False),
        (["srun", "-n1", *TWO], False, 2, True),
        (["salloc", "-n2", *UNIPAR], False, 1, True),
        (TWO, True, 2, True),
        (TORCHRUN, True, 2, False),
        (["srun", "-n1", *TORCHRUN], False, 2, False),
        ([*LAUNCH_COMMANDS["mpirun"], "unipar", "run", "x.yaml"], True, 2, False),
    ],
    ids=[
        *("srun", "srun in a batch", "a shell a rank", "a step of one task", "salloc", "a batch alone"),
        *("torchrun in a batch", "srun torchrun", "mpirun in a batch"),
    ],
)
def test_who_is_a_rank(words: list[str], batched: bool, size: int, by_us: bool, slurm: Slurm, tmp_path: Path) -> None:
    """The variables of Slurm are there in each of these, and mean a rank in some."""
    done = run(slurm, batch(words, tmp_path) if batched else words, tmp_path)
    said = (tmp_path / "said").read_text("utf-8") if batched else done.stderr
    assert done.returncode == 0, said + done.stderr
    report = Report.read(tmp_path / "runs/x")
    assert (report.size, report.steps, ours(tmp_path / "runs/x")) == (size, 12, by_us)
    assert report.losses[-1] == (12, pytest.approx(3.385748267173767, rel=1e-6))
    assert not [name for name in os.listdir(tmp_path / "runs/x") if name.startswith(".")]


def test_a_rank_fails_and_nobody_waits_for_ever(slurm: Slurm, tmp_path: Path) -> None:
    """srun leaves the others alone without --kill-on-bad-exit; they see that their peer is gone."""
    began = time.monotonic()
    done = run(slurm, ["srun", "-n2", *UNIPAR], tmp_path, "launch: {timeout: 30, heartbeat: 20}\n")
    assert done.returncode == 0, done.stderr
    failing = ["srun", "-n2", *UNIPAR, "--overwrite", "--set", "task.args.fails_on=1"]
    done = run(slurm, failing, tmp_path, "launch: {timeout: 30, heartbeat: 20}\n")
    assert done.returncode != 0
    assert "ValueError: this rank was told to fail" in done.stderr
    assert time.monotonic() - began < 60
