"""One launch over machines: started, awaited, and its losses read on each of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.machine_launches import Job
from tests.support.machines.machine import Machine
from tests.support.matrix import CONFIG, PATIENCE, Outcome, sentence_of
from unipar.results.run_report import Report
from unipar.run_folder.run_log import RunLog

AFTERWARDS = 5.0
"""Seconds that processes may take to go when their launcher has ended."""


def size_arguments(size: int) -> list[str]:
    """Return what makes the config, whose batches have 8 samples, one for so many ranks."""
    total = 8 if 8 % size == 0 else 4 * size
    return ["--set", f"parallel.data={size}", "--set", f"batch.total={total}"]


@dataclass
class Started:
    """A launch that runs: `with Started(job, "torchrun c10d", "native", logs) as run`."""

    job: Job
    launcher: str
    backend: str
    logs: Path
    """Folder, outside the machines, of a log for each command."""

    shared: Path | None = None
    """Folder in which all machines run; None: each in one of its own."""

    more: Sequence[str] = ()
    config: str = CONFIG
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict[int, Mapping[str, str]])
    """Further variables, by number of a machine."""

    late: Mapping[int, float] = field(default_factory=dict[int, float])
    """Seconds by which the command of a machine comes later."""

    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict[int, "subprocess.Popen[bytes]"])
    """Commands that were started, by number of their machine."""

    def __enter__(self) -> Started:
        self.logs.mkdir(parents=True)
        self._before = {machine.number: set(machine.processes()) for machine in self.job.machines}
        self._began = time.monotonic()
        self.job.prepare()
        for machine in self.job.machines:
            folder = self.folder_on(machine).parents[1]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "x.yaml").write_text(self.config, "utf-8")
        at = str(self.shared) if self.shared else self._folder
        arguments = ["run", "x.yaml", "--backend", self.backend, *size_arguments(self.job.size), *self.more]
        for machine, words in self.job.commands(self.launcher, "unipar", *arguments):
            if late := self.late.get(machine.number):
                words = ["sh", "-c", f'sleep {late}; exec "$@"', "sh", *words]
            own = [f"{name}={value}" for name, value in self.variables.get(machine.number, {}).items()]
            words = ["env", *own, *words] if own else words  # there, where their files are
            self.processes[machine.number] = machine.start(words, self.log_of(machine), env=self.job.env, at=at)
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.job.machines:
            for pid in self.left_on(machine):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    @property
    def _folder(self) -> str:
        return f"/tmp/{self.logs.name}"

    def folder_on(self, machine: Machine) -> Path:
        """Return the run folder as seen from outside."""
        return (self.shared or machine.path(self._folder)) / "runs/x"

    def log_of(self, machine: Machine) -> Path:
        return self.logs / f"{machine.name}.log"

    def said_on(self, machine: Machine) -> str:
        log = self.log_of(machine)
        return log.read_text("utf-8", errors="replace") if log.exists() else ""

    def left_on(self, machine: Machine) -> dict[int, str]:
        """Return command lines of processes that were not there before the launch."""
        return {p: words for p, words in machine.processes().items() if p not in self._before[machine.number]}

    @property
    def left(self) -> dict[str, list[str]]:
        """The same of each machine, by name, where there are any."""
        found = {machine.name: list(self.left_on(machine).values()) for machine in self.job.machines}
        return {name: lines for name, lines in found.items() if lines}

    @property
    def commands_run(self) -> bool:
        """Whether one of the commands that were started has not ended."""
        return any(process.poll() is None for process in self.processes.values())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def wait(self, patience: float = PATIENCE) -> Outcome:
        """Wait for the end; return the losses, if every machine has them, or else what was said."""
        until = time.monotonic() + patience
        for process in self.processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return Outcome(patience, None, f"HUNG: no end in {patience:g} s; {self.sentences()}")
        seconds = self.seconds
        until = time.monotonic() + AFTERWARDS
        while self.left and time.monotonic() < until:
            time.sleep(0.05)
        codes = [process.returncode for process in self.processes.values() if process.returncode]
        if codes:
            return Outcome(seconds, codes[0], self.sentences())
        if self.left:
            return Outcome(seconds, -1, f"left running: {self.left}")
        first, *others = self.job.machines
        losses = Report.read(self.folder_on(first)).losses
        for machine in others:
            if (there := losses_in(self.folder_on(machine))) != losses:
                return Outcome(seconds, -1, f"{machine.name} has the losses {there}, {first.name} has {losses}")
        return Outcome(seconds, 0, losses=tuple(losses))

    def sentences(self) -> str:
        """Return what unipar said, with the names of those who said so."""
        said: dict[str, list[str]] = {}
        for machine in self.job.machines:
            if self.log_of(machine).exists():
                said.setdefault(sentence_of(self.said_on(machine)).strip(), []).append(machine.name)
        return " | ".join(f"{', '.join(names)}: {sentence}" for sentence, names in said.items())


def losses_in(run: Path) -> list[tuple[int, float]]:
    """Return each logged step with its loss, of whichever rank's run log in a run folder has them."""
    found = {
        (row["step"], row["loss"])
        for path in run.glob("rank-*.jsonl")
        for row in RunLog.read(path)
        if row["event"] == "step" and "loss" in row
    }
    return sorted(found)
