"""What can happen to a run over machines, and what becomes of it: `make machines ARGS=--faults` prints a table."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.machine_launches import ON_EACH, OVER_SSH, Job, needs_slurm, reason_not_here
from tests.support.machine_runs import Started, losses_in
from tests.support.machines.clock import reason_no_wrong_clock, wrong_clock
from tests.support.machines.machine import Machine, reason_no_firewall
from tests.support.machines.slurm import slurm_over
from tests.support.machines.start import machines
from tests.support.matrix import CONFIG

TIMEOUT, HEARTBEAT = 15.0, 10.0
"""Limits of a run to which something happens."""

PATIENCE = 120.0
LATE, OFF, LOST = 30.0, 90, 5
"""Seconds by which a machine comes late; seconds by which its clock is wrong; percent of the packets that are lost."""

ENDLESS = ("--set", "train.steps=1000000", "--set", "log.every=1", "--set", "task.args.pause=0.01")
LIMITS = ("--set", f"launch.timeout={TIMEOUT:g}", "--set", f"launch.heartbeat={HEARTBEAT:g}")

AGENTS = {
    "torchrun c10d": "torchrun",
    "torchrun static": "torchrun",
    "accelerate launch": "accelerate launch",
    "deepspeed": "deepspeed.launcher.launch",
    "mpirun": "orted",
    "horovodrun": "horovod.runner",
    "srun": "slurmstepd",
    "srun torchrun": "torchrun",
    "by hand": "sh -c",
}
"""Part of the command line of what starts the ranks on one machine, by launcher."""

_RANK = re.compile(r"\S*python\S* (-u )?-m unipar ")
_SENTENCES = (re.compile("unipar: (.*)"), re.compile(r"\b(\w*(?:Error|Exception)\b: .+)"))
"""What is a sentence in a log; the second only where the first is not found."""


@dataclass
class Drill:
    """Result of one fault."""

    fault: str
    launcher: str
    backend: str
    seconds: float = 0.0
    """From the fault, or from the start if the fault was there before, to the end of all processes of all machines."""

    codes: dict[str, int | None] = field(default_factory=dict[str, int | None])
    """Exit code of each command by machine; None: it had not ended."""

    sentences: dict[str, str] = field(default_factory=dict[str, str])
    """Last sentence of each machine's log."""

    left: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Command lines of what was still there at the end, by machine."""

    not_here: str = ""
    survives: bool = False
    """Whether the run should train to its end all the same."""

    @property
    def well(self) -> bool:
        """Whether nothing of unipar's was left, and a run that should have gone to its end did."""
        if self.not_here:
            return True
        ended = all(code == 0 for code in self.codes.values()) or not self.survives
        return ended and not any(is_rank(line) for lines in self.left.values() for line in lines)


def is_rank(command_line: str) -> bool:
    """Whether a process is one of unipar's, not of the launcher that started it."""
    return _RANK.match(command_line) is not None


def kill_machine(run: Started, victim: Machine) -> None:
    """Its processes and its connections are gone at once."""
    victim.power_off()


def pull_cable(run: Started, victim: Machine) -> None:
    """Nobody hears of it; the machine goes on."""
    victim.pull_cable()


def kill_agent(run: Started, victim: Machine) -> None:
    """What started the ranks there is killed, not the ranks."""
    part = AGENTS[run.launcher]
    agents = [pid for pid, words in run.left_on(victim).items() if part in words and not is_rank(words)]
    assert agents, f"no {part} on {victim.name}: {run.left_on(victim)}"
    for pid in agents:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_rank(run: Started, victim: Machine) -> None:
    """A rank there is killed; its launcher is not."""
    ranks = [pid for pid, words in run.left_on(victim).items() if is_rank(words)]
    assert ranks, f"no rank on {victim.name}: {run.left_on(victim)}"
    os.kill(min(ranks), signal.SIGKILL)


DURING: dict[str, Callable[[Started, Machine], None]] = {
    "machine killed": kill_machine,
    "cable pulled": pull_cable,
    "agent killed": kill_agent,
    "rank killed": kill_rank,
}
"""Faults of a machine while it trains: the run ends."""

BEFORE = {
    "machine late": "",
    "clock wrong": reason_no_wrong_clock(),
    "packets lost": reason_no_firewall() if os.getuid() == 0 else "rules for packets are made by root only",
}
"""Faults that are there from the start, and why they cannot be had here: the run trains to its end."""

FAULTS = (*DURING, *BEFORE)


def drill(
    fault: str, folder: Path, launcher: str = "torchrun c10d", backend: str = "native", shared: bool = False
) -> Drill:
    """Start a run over two machines of its own, let it happen to the second, and wait until all has ended."""
    result = Drill(fault, launcher, backend, survives=fault in BEFORE)
    if why := _reason_not_here(fault, launcher):
        result.not_here = why
        return result
    common = folder / "shared"
    common.mkdir(parents=True)
    with machines(2, folder / "machines", share=[common], ssh=launcher in OVER_SSH) as made:
        victim = made[1]
        if not needs_slurm(launcher):
            _drill(result, Job(made, (1, 1)), victim, folder, common if shared else None)
            return result
        with slurm_over(made) as variables:
            _drill(result, Job(made, (1, 1), variables), victim, folder, common if shared else None)
    return result


def _reason_not_here(fault: str, launcher: str) -> str:
    """Why it cannot be seen with this launcher here; empty: it can."""
    if fault in BEFORE and launcher not in ON_EACH:
        return "for what starts on each machine"
    if fault == "clock wrong" and launcher == "torchrun c10d":
        return "its rendezvous takes a machine for dead whose clock is 15 s off; try --launcher 'torchrun static'"
    return BEFORE.get(fault) or reason_not_here(launcher)


def _drill(result: Drill, job: Job, victim: Machine, folder: Path, shared: Path | None) -> None:
    variables: dict[int, Mapping[str, str]] = {}
    if result.fault == "clock wrong":
        variables[victim.number] = wrong_clock(victim, OFF)
    if result.fault == "packets lost":
        for machine in job.machines:
            machine.lose_packets(LOST)
    more = (*LIMITS, *(ENDLESS if result.fault in DURING else ()))
    late = {victim.number: LATE} if result.fault == "machine late" else {}
    with Started(job, result.launcher, result.backend, folder / "run", shared, more, CONFIG, variables, late) as run:
        if result.fault in DURING:
            _wait_until_trained(run)
            began = time.monotonic()
            DURING[result.fault](run, victim)
        else:
            began = time.monotonic()
        while (run.left or run.commands_run) and time.monotonic() < began + PATIENCE:
            time.sleep(0.05)
        result.seconds, result.left = time.monotonic() - began, run.left
        for machine in job.machines:
            if machine.number in run.processes:
                result.codes[machine.name] = run.processes[machine.number].poll()
                found = [pattern.findall(run.said_on(machine)) for pattern in _SENTENCES]
                result.sentences[machine.name] = next((lines[-1] for lines in found if lines), "(no sentence)")


def _wait_until_trained(run: Started) -> None:
    until = time.monotonic() + PATIENCE
    while len(losses_in(run.folder_on(run.job.machines[0]))) < 5:
        over = any(process.poll() is not None for process in run.processes.values())
        assert not over, f"it ended before anything happened: {run.sentences()}"
        assert time.monotonic() < until, f"no step within {PATIENCE:g} s: {run.sentences()}"
        time.sleep(0.1)


def draw_drills(drills: list[Drill]) -> None:
    """Print a table, and what each machine's log ends with."""
    console = Console(width=max(Console().width, 120))
    table = Table("fault", "launcher", "backend", "seconds", "exit codes", "left running")
    for one in drills:
        left = "; ".join(f"{name}: {line[:60]}" for name, lines in one.left.items() for line in lines) or "nothing"
        codes = ", ".join(f"{name} {'-' if code is None else code}" for name, code in one.codes.items())
        seconds = f"{one.seconds:.1f}" if not one.not_here else "not here"
        table.add_row(one.fault, one.launcher, one.backend, seconds, codes, left if not one.not_here else "")
    console.print(table)
    for one in drills:
        if one.not_here:
            console.print(f"{one.fault}: not here: {one.not_here}", markup=False, highlight=False, soft_wrap=True)
        for name, sentence in one.sentences.items():
            console.print(f"{one.fault}, {name}: {sentence}", markup=False, highlight=False, soft_wrap=True)
