"""Jobs that `unipar submit` hands to Slurm over two and three machines, really run; they share the run folder."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launchers import environment
from tests.support.machines.machine import Machine
from tests.support.machines.slurm import slurm_over
from tests.support.machines.start import machines, reason_no_machines
from tests.support.programs import skip_because
from tests.support.slurm import reason_no_cluster
from tests.support.world import ROOT
from unipar.results.run_report import Report
from unipar.run_folder.run_attempts import count_attempts

WHY_NOT = reason_no_machines() or reason_no_cluster()
pytestmark = [pytest.mark.slow, skip_because(WHY_NOT)]

CONFIG = """
task: {{use: {root}/tests/support/tiny.py:Tiny, args: {{pause: 0.05}}}}
device: cpu
batch: {{total: 12}}
train: {{steps: {steps}, optimizer: {{name: sgd, lr: 0.01}}}}
log: {{every: 5}}
launch: {{timeout: 20, heartbeat: 10, restarts: {restarts}}}
checkpoint: {{every: 10}}
out: {folder}/run
machines: {{nodes: {nodes}, ranks_per_node: 1, on: slurm, slurm: {{check: {check}}}}}
"""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Site:
    """Machines in a Slurm cluster, and the folder that all of them see."""

    made: list[Machine]
    env: dict[str, str]
    folder: Path

    def call(self, *words: str) -> str:
        done = self.made[0].run(list(words), env=self.env, at=str(self.folder))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *, nodes: int, steps: int, restarts: int = 0, check: bool = False) -> str:
        """Return the id of a job."""
        text = CONFIG.format(
            root=ROOT, steps=steps, nodes=nodes, restarts=restarts, folder=self.folder, check=str(check).lower()
        )
        (self.folder / "x.yaml").write_text(text, encoding="utf-8")
        said = self.call(sys.executable, "-m", "unipar", "submit", "x.yaml")
        found = re.search(r"\b(\d+)\b", said)
        assert found, said
        return found[1]

    def of(self, job: str, field: str) -> str:
        """Return what Slurm says of a job."""
        found = re.search(rf"\b{field}=(\S+)", self.call("scontrol", "show", "job", job))
        assert found
        return found[1]

    def wait(self, job: str, *states: str, seconds: float = 240.0) -> str:
        """Return the state of a job once it is one of these."""
        until = time.monotonic() + seconds
        while (state := self.of(job, "JobState")) not in (states or OVER):
            assert time.monotonic() < until, f"{state}\n{self.said}"
            time.sleep(0.3)
        return state

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 180
        while not (run := self.folder / "run/rank-0.jsonl").exists() or Report.read(run.parent).steps < step:
            assert time.monotonic() < until, self.said
            time.sleep(0.3)

    @property
    def said(self) -> str:
        """What the job has printed."""
        return "".join(path.read_text("utf-8", errors="replace") for path in sorted(self.folder.rglob("slurm-*.out")))


@contextmanager
def site(number: int, tmp_path: Path) -> Generator[Site]:
    folder = tmp_path / "shared"
    folder.mkdir()
    with machines(number, tmp_path / "machines", share=[folder]) as made, slurm_over(made) as variables:
        yield Site(list(made), {**environment(), **variables}, folder)


def test_two_nodes(tmp_path: Path) -> None:
    """The file as it is written: one look at both machines, then a rank on each."""
    with site(2, tmp_path) as here:
        job = here.submit(nodes=2, steps=12, check=True)
        assert here.wait(job) == "COMPLETED", here.said
        report = Report.read(here.folder / "run")
        assert (report.size, report.steps) == (2, 12)
        assert "2 machines, started by srun: node1 (10.213.7.1), node2 (10.213.7.2)" in here.said


def test_a_signal_and_a_requeue_on_three_nodes(tmp_path: Path) -> None:
    """All ranks stop at one step and save; the job is queued again, goes on from there and does the rest."""
    with site(3, tmp_path) as here:
        job = here.submit(nodes=3, steps=80, restarts=1)
        here.wait_for_step(15)
        here.call("scancel", "--signal=TERM", job)
        assert here.wait(job, "COMPLETED", "FAILED", seconds=420) == "COMPLETED", here.said
        assert here.of(job, "Restarts") == "1"
        assert count_attempts(here.folder / "run") == 1
        assert Report.read(here.folder / "run").steps == 80
        assert re.search(r"goes on after step \d+ from ", here.said)


def test_a_node_is_lost(tmp_path: Path) -> None:
    """Its cable is pulled: the others end within launch.timeout and name it, and Slurm ends the job."""
    with site(2, tmp_path) as here:
        job = here.submit(nodes=2, steps=5000)
        here.wait_for_step(5)
        here.made[1].pull_cable()
        began = time.monotonic()
        sentence = "node2 (10.213.7.2), rank 1, was lost after step "  # and which
        while sentence not in here.said:
            assert time.monotonic() - began < 20, here.said
            time.sleep(0.2)
        assert "nothing was heard of it for 10 s (launch.heartbeat): is the machine up" in here.said
        assert here.wait(job, seconds=180) in ("NODE_FAIL", "FAILED")
