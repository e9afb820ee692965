"""Every launcher with every backend, really started: `make matrix` prints what came of each."""

from __future__ import annotations

import argparse
import math
import os
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

from tests.support.launchers import LAUNCH_COMMANDS, environment, in_private_network, launch_command, reason_missing
from tests.support.slurm import Slurm, cluster
from tests.support.world import ROOT
from unipar.backend import registry
from unipar.results.run_report import Report

BACKENDS = ("native", "deepspeed", "horovod", "accelerate")
PATIENCE = 120.0
ENOUGH_DIGITS = 6.0
"""Digits: what fp32 keeps when sums are made in another order."""

CONFIG = f"""
task: {{use: {ROOT}/tests/support/tiny.py:Tiny}}
device: cpu
batch: {{total: 8}}
train: {{steps: 12, optimizer: {{name: sgd, lr: 0.01}}}}
log: {{every: 5}}
launch: {{timeout: 90}}
"""

REFUSED: dict[str, list[str]] = {
    "accelerate launch --cpu": [
        *("accelerate", "launch", "--cpu", "--num_processes", "2", "-m", "unipar", "run", "x.yaml"),
    ],
    "torchrun, single": [*LAUNCH_COMMANDS["torchrun"], "unipar", "run", "x.yaml", "--backend", "single"],
    "torchrun, another size": [*LAUNCH_COMMANDS["torchrun"], "unipar", "run", "x.yaml", "--set", "parallel.data=4"],
    "RANK and WORLD_SIZE alone": [
        *("env", "RANK=0", "WORLD_SIZE=2", sys.executable, "-m", "unipar", "run", "x.yaml"),
    ],
}
"""What cannot be; each says so in a sentence."""


@dataclass(frozen=True)
class Outcome:
    """What came of one launch."""

    seconds: float = 0.0
    code: int | None = None
    said: str = ""
    """The sentence of a refusal, or why nothing was started."""

    losses: tuple[tuple[int, float], ...] = ()

    def digits(self, by: Outcome) -> float:
        """How many digits its losses share with another's; infinite: every bit."""
        if not self.losses or [step for step, _ in self.losses] != [step for step, _ in by.losses]:
            return 0.0
        pairs = [(a, b) for (_, a), (_, b) in zip(self.losses, by.losses, strict=True)]
        off = max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in pairs)
        return math.inf if off == 0 else -math.log10(off)

    def describe(self, by: Outcome) -> str:
        if self.code is None:
            return self.said.partition(":")[0]
        if self.code != 0:
            return f"exit {self.code}"
        digits = self.digits(by)
        return f"{'equal' if digits == math.inf else f'{digits:.1f} digits'}, {self.seconds:.1f} s"


def sentence_of(log: str) -> str:
    """Return the first sentence of unipar in a log, or else its end."""
    sentences = [line.partition("unipar: ")[2] for line in log.splitlines() if "unipar: " in line]
    return sentences[0] if sentences else log[-2000:]


def run_command(command: Sequence[str], folder: Path, more: dict[str, str] | None = None) -> Outcome:
    """Start it in an empty folder with the config; end it, and all that it started, when it takes too long."""
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text(CONFIG, encoding="utf-8")
    began = time.monotonic()
    started = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(folder), **(more or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = started.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        return Outcome(PATIENCE, None, f"HUNG: no end in {PATIENCE:g} s")
    seconds = time.monotonic() - began
    if started.returncode != 0:
        return Outcome(seconds, started.returncode, sentence_of(said))
    return Outcome(seconds, 0, losses=tuple(Report.read(folder / "runs/x").losses))


def run_backend_under_launcher(launcher: str, backend: str, folder: Path, slurm: Slurm | None) -> Outcome:
    if why := reason_missing(launcher) or registry.why_not_installed(registry.find_backend(backend)):
        return Outcome(said=f"not here: {why}")
    command = launch_command(launcher, "unipar", "run", "x.yaml", "--backend", backend)
    where = folder / f"{launcher.replace(' ', '-')}-{backend}"
    if launcher != "srun":
        return run_command(command, where)
    assert slurm is not None
    return run_command(slurm.inside(command[len(in_private_network([])) :]), where, slurm.environment)


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.support.matrix", description=__doc__)
    asked.add_argument("--launcher", action="append", choices=LAUNCH_COMMANDS, help="only this one; repeat it for more")
    asked.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; repeat it for more")
    chosen = asked.parse_args()
    launchers, backends = chosen.launcher or list(LAUNCH_COMMANDS), chosen.backend or list(BACKENDS)
    err = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="matrix-", dir="/tmp") as made, ExitStack() as stack:
        folder = Path(made)
        needed = "srun" in launchers and not reason_missing("srun")
        slurm = stack.enter_context(cluster(folder / "slurm")) if needed else None
        by = run_backend_under_launcher("python", "native", folder / "by", None)
        found: dict[tuple[str, str], Outcome] = {}
        for launcher in launchers:
            for backend in backends:
                err.print(f"{launcher} x {backend} ...", end=" ", highlight=False)
                found[launcher, backend] = run_backend_under_launcher(launcher, backend, folder, slurm)
                err.print(found[launcher, backend].describe(by), markup=False, highlight=False)
        refused = {
            name: run_command(in_private_network(it), folder / f"no-{i}")
            for i, (name, it) in enumerate(REFUSED.items())
        }
    draw_outcomes(found, refused, by, "two ranks")
    well = all_equal(found, by)
    return int(not (well and all(one.code and "\n" not in one.said for one in refused.values())))


def all_equal(found: Mapping[tuple[str, str], Outcome], by: Outcome) -> bool:
    """Whether each launch that could be tried has the losses of `by`."""
    ran = [one for one in found.values() if not one.said.startswith("not here")]
    return all(one.code == 0 and one.digits(by) >= ENOUGH_DIGITS for one in ran)


def draw_outcomes(
    found: Mapping[tuple[str, str], Outcome], refused: Mapping[str, Outcome], by: Outcome, what: str
) -> None:
    """Print a table of launchers and backends, and what was said where there are no losses."""
    console = Console(width=max(Console().width, 120))
    backends = list(dict.fromkeys(backend for _, backend in found))
    table = Table("", *backends, title=f"{what}: losses compared with `python` and native, and seconds")
    notes: list[tuple[str, str]] = []
    for launcher in dict.fromkeys(launcher for launcher, _ in found):
        row = [found[launcher, backend] for backend in backends]
        table.add_row(launcher, *(x.describe(by) for x in row))
        notes += dict.fromkeys((launcher, x.said) for x in row if x.said)
    console.print(table)
    for what, said in [*notes, *((name, one.said) for name, one in refused.items())]:
        console.print(f"{what}: {said}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
