"""Ray jobs of every backend over two machines that share nothing, really submitted: `make ray` prints a table.

The last job shares its run folder: a rank is killed there, and Ray Train starts all again. Ray is installed once, into
an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.launchers import environment
from tests.support.machine_runs import losses_in, size_arguments
from tests.support.machines.machine import Machine
from tests.support.machines.ray import ray_over
from tests.support.machines.start import machines, reason_no_machines
from tests.support.matrix import BACKENDS, CONFIG, Outcome, run_command
from tests.support.ray_environment import NoRay, is_here, make_environment
from tests.support.world import ROOT
from unipar.results.run_report import Report
from unipar.run_folder.run_attempts import read_attempts

PATIENCE = 600.0
RESTART = "killed"
"""Name of the job in which a rank is killed."""

KILLED_AFTER, STEPS = 10, 60
"""Steps after which a rank is killed; steps of that job."""

_SECTION = "machines: {{nodes: 2, per: 1, on: ray, folder: {folder}, ray: {{address: '{address}', at: {at}}}}}\n"
_ROUGH = (
    *("--set", "launch.restarts=1", "--set", "checkpoint.every=5", "--set", f"train.steps={STEPS}"),
    *("--set", "log.every=1", "--set", "task.args.pause=0.1"),
)


@dataclass
class RayJob:
    """A job that was handed over from the first machine."""

    made: Sequence[Machine]
    env: Mapping[str, str]
    name: str
    at: Path
    """Folder on the machines in which its run folder is."""

    shared: bool = False
    id: str = ""

    def call(self, *words: str) -> str:
        """Return what a command of unipar says on the first machine."""
        done = self.made[0].run([sys.executable, "-m", "unipar", *words], env=self.env, at="/tmp/job")
        assert done.returncode == 0, f"unipar {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, config: str, *sets: str) -> None:
        folder = self.made[0].path("/tmp/job")
        folder.mkdir(exist_ok=True)
        (folder / "x.yaml").write_text(config, "utf-8")
        said = self.call("submit", "x.yaml", "--out", f"runs/{self.name}", *sets)
        found = re.search(r"ray job (\S+):", said)
        assert found, said
        self.id = found[1]

    def wait(self) -> str:
        """Return how it stands, as `unipar jobs` says, once it is over."""
        until = time.monotonic() + PATIENCE
        while (state := self.state) in ("pending", "running") and time.monotonic() < until:
            time.sleep(10)  # a look starts Ray's client, which takes seconds of a core
        return state

    @property
    def state(self) -> str:
        rows = [line for line in self.call("jobs").splitlines() if self.id in line]
        found = re.search(r"\b(pending|running|succeeded|failed|stopped)\b", " ".join(rows).lower())
        return found[1] if found else f"unknown: {rows}"

    @property
    def said(self) -> str:
        return self.call("jobs", "logs", self.id)

    def folder_on(self, machine: Machine) -> Path:
        """Return its run folder as seen from outside."""
        return (self.at if self.shared else machine.path(str(self.at))) / self.name

    def kill_a_rank(self) -> None:
        """Kill the one on the second machine, once it has trained for some steps."""
        until = time.monotonic() + PATIENCE
        run_log = self.folder_on(self.made[0]) / "rank-1.jsonl"
        while not run_log.exists() or max([s for s, _ in losses_in(run_log.parent)], default=0) < KILLED_AFTER:
            assert time.monotonic() < until, self.said
            time.sleep(0.1)
        workers = [pid for pid, words in self.made[1].processes().items() if "RayTrainWorker" in words]
        assert workers, self.made[1].processes()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


def _of_job(job: RayJob, began: float) -> Outcome:
    state, seconds = job.wait(), time.monotonic() - began
    if state != "succeeded":
        return Outcome(seconds, 1, f"{state}: {job.said[-3000:]}")
    first, *others = [Report.read(job.folder_on(m)).losses for m in job.made[: 1 if job.shared else None]]
    if any(losses != first for losses in others):
        return Outcome(seconds, 1, f"the machines have the losses {[first, *others]}")
    return Outcome(seconds, 0, losses=tuple(first))


def play(backends: Sequence[str], folder: Path) -> tuple[dict[str, tuple[Outcome, Outcome]], str]:
    """Return the outcome of each job, with that of the same ranks on one machine; and what the restart went on from."""
    unipar = [sys.executable, "-m", "unipar", "run", "x.yaml", *size_arguments(2)]
    by = run_command(unipar, folder / "by")
    rough = run_command([*unipar, *_ROUGH], folder / "by-rough")
    shared, said, found = folder / "shared", "", dict[str, tuple[Outcome, Outcome]]()
    shared.mkdir()
    env = {**environment(), "HOME": "/root", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"TORCH_EXTENSIONS_DIR": "/tmp/compiled", "RAY_USAGE_STATS_ENABLED": "0"}
    with machines(2, folder / "machines", share=[shared]) as made, ray_over(made, env) as address:
        for name in (*backends, RESTART):
            killed = name == RESTART
            job = RayJob(made, env, name, shared if killed else Path("/root/unipar-runs"), killed)
            section = _SECTION.format(folder="shared" if killed else "auto", address=address, at=job.at)
            began = time.monotonic()
            if killed:
                job.submit(CONFIG + section, *_ROUGH)
                job.kill_a_rank()
            else:
                job.submit(CONFIG + section, "--set", f"backend={name}")
            found[name] = (_of_job(job, began), rough if killed else by)
            sys.stderr.write(f"ray x {name}: {found[name][0].describe(found[name][1])}\n")
            if killed:
                said = _went_on(job)
    return found, said


def _went_on(job: RayJob) -> str:
    """Return from where the second attempt went on; empty where there was none, or it began anew."""
    attempts = read_attempts(job.folder_on(job.made[0]))
    found = re.search(r"goes on after step (\d+) from ", job.said)
    return f"{len(attempts)} earlier attempt; it went on after step {found[1]}" if attempts and found else ""


def main() -> int:
    """Print a table; return 1 if a job has other losses, or the one that was killed did not go on."""
    asked = argparse.ArgumentParser(prog="python -m tests.support.ray_matrix", description=__doc__)
    asked.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; repeat it for more")
    asked.add_argument("--keep", type=Path, help="folder for logs and disks of the machines; else they are removed")
    chosen = asked.parse_args()
    if why := reason_no_machines():
        sys.exit(f"no machines: {why}")
    if not is_here():
        try:
            python = make_environment()
        except NoRay as e:
            sys.exit(f"no Ray: {e}")
        words = [str(python), "-m", "tests.support.ray_matrix", *sys.argv[1:]]
        return subprocess.run(words, check=False, cwd=ROOT).returncode
    with ExitStack() as stack:
        folder = Path(chosen.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")))
        folder.mkdir(parents=True, exist_ok=True)
        found, went_on = play(chosen.backend or BACKENDS, folder)
    table = Table("job", "losses, seconds", title="Ray over two machines, compared with the same ranks on one")
    for name, (outcome, by) in found.items():
        table.add_row(name, outcome.describe(by))
    console = Console(width=120)
    console.print(table)
    for name, (outcome, _) in found.items():
        if outcome.said:
            console.print(f"{name}: {outcome.said}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{RESTART}: {went_on or 'did not go on from a checkpoint'}", markup=False, highlight=False)
    return int(not (went_on and all(one.code == 0 and one.digits(by) >= 6 for one, by in found.values())))


if __name__ == "__main__":
    sys.exit(main())
