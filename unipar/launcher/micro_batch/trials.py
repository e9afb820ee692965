"""Trials of microbatches: each a world of its own in new processes, which ends after some steps."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from unipar.backend import Backend
from unipar.config.config import Eval
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, Hung, OutOfMemory, Stopped, UniparError, WorkerFailed
from unipar.launcher.micro_batch.choice import PREFIX, CandidateWorld, MicroTrial
from unipar.launcher.micro_batch.trial_worker import PLAN_ENTRY, SCRIPT_ENTRY, TRIAL_ENTRY, plan_path, trial_path
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.signals import SignalReceiver
from unipar.launcher.processes.starters import ENTRY_MODULES, SharedForkServer, may_fork
from unipar.memory.sources.malloc_build import MeterUnavailable, build_meter, preload_environment
from unipar.run_folder import folder
from unipar.task.reference import TaskRef
from unipar.training.out_of_memory import mentions_out_of_memory
from unipar.utils.text import format_size

SECONDS_BETWEEN_LOOKS = 0.1
"""Seconds between two looks at whether a signal has come."""


@dataclass(frozen=True)
class TrialCode:
    """Code that a trial trains."""

    ref: TaskRef | None
    """Reference to the task; None if the script is run again."""

    script: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return its entry in launch.json."""
        return {"script": list(self.script)} if self.ref is None else {"task": self.ref.to_json()}


@final
class Trials:
    """Context manager: the process from which trials are forked, and the folder of their logs."""

    def __init__(
        self, code: TrialCode, worlds: Sequence[CandidateWorld], limit: int, say: Callable[[str], None]
    ) -> None:
        self._code, self._worlds, self._limit, self._say = code, worlds, limit, say
        self._open = ExitStack()
        self._number = 0
        self._errors: dict[tuple[str, int], UniparError] = {}
        self.done: list[MicroTrial] = []

    def __enter__(self) -> Self:
        first = self._worlds[0].settled
        try:
            self._environment = preload_environment(build_meter()) if first.device == "cpu" else {}
        except MeterUnavailable as e:
            raise ConfigError(
                f"{PREFIX} counts on the CPU what ranks allocate, and this machine cannot do it: {e}; or give "
                "batch.micro a number"
            ) from None
        self._folder = Path(tempfile.mkdtemp(prefix="unipar-micro-"))
        with ExitStack() as failed:
            failed.push(self._remove_folder)
            self._signals = failed.enter_context(SignalReceiver())
            modules = [*ENTRY_MODULES, "unipar.launcher.micro_batch.trial_worker"]
            use, patience = may_fork(first.config, first.device), first.config.launch.timeout
            server = SharedForkServer(modules, self._environment, use=use, patience=patience)
            self._server = failed.enter_context(server)
            self._server.start(list({w.backend.name: w.backend for w in self._worlds}.values()), self._look)
            self._look()
            self._open = failed.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _remove_folder(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if str(self._folder) not in str(error):  # else the error names a log in it
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self) -> None:
        """Raise Stopped if a signal has come."""
        if self._signals.received_signals:
            raise Stopped(f"stopped by {self._signals.received_signals[0].name} while {PREFIX} was tried")

    def plan(self) -> dict[str, dict[int, int] | str]:
        """Return for each world the predicted peak of each candidate, or why it cannot be predicted."""
        first = self._worlds[0]
        jobs = [
            {"config": w.settled.config.json_for_ranks(), "settled": w.settled.to_json(), "micros": list(w.candidates)}
            for w in self._worlds
        ]
        entry = SCRIPT_ENTRY if self._code.ref is None else PLAN_ENTRY
        try:
            run = self._run(first.settled, first.backend, entry, {"plan": jobs}, ranks=1)
        except Stopped:
            raise
        except UniparError as e:
            return {w.name: str(e).partition("\n")[0] for w in self._worlds}
        planned: list[dict[str, Any]] = json.loads(plan_path(run).read_text("utf-8"))
        return {
            w.name: answer["refused"] or {int(micro): peak for micro, peak in answer["peaks"].items()}
            for w, answer in zip(self._worlds, planned, strict=True)
        }

    def fits(self, world: CandidateWorld, micro: int) -> bool:
        """Return whether a microbatch of this size fits; any error but a lack of memory is raised."""
        for trial in self.done:
            if (trial.world, trial.micro) == (world.name, micro):
                return trial.fits
        self._say(f"{PREFIX}: trying {micro} of {world.settled.sizes.local} in {world.name}")
        settled, trial = _without_extras(world.at(micro)), None
        entry = SCRIPT_ENTRY if self._code.ref is None else TRIAL_ENTRY
        try:
            run = self._run(settled, world.backend, entry, {"trial": {"limit": self._limit}}, ranks=settled.ranks)
            peaks = [json.loads(trial_path(run, r).read_text("utf-8"))["peak"] for r in range(settled.ranks)]
            trial = MicroTrial(world.name, micro, fits=True, peak=max(peaks))
            used = format_size(max(peaks))
            self._say(f"{PREFIX}: {micro} fits: {used} of {format_size(self._limit)}")
        except UniparError as e:
            if not ended_for_lack_of_memory(e):
                raise
            self._errors[world.name, micro] = e
            why = re.split(r"[:;]\s|\n", str(e))[0]
            trial = MicroTrial(world.name, micro, fits=False, why=why)
            self._say(f"{PREFIX}: {micro} does not fit: {why}")
        self.done.append(trial)
        return trial.fits

    def explain_lack(self, world: CandidateWorld, planned: int | None) -> UniparError:
        """Return the error of a world in which nothing fits, with the numbers and what would need less.

        `planned`: bytes that the smallest peak has by the plan.
        """
        micro = min(m for name, m in self._errors if name == world.name)
        error = self._errors[world.name, micro]
        if not (isinstance(error, OutOfMemory) or mentions_out_of_memory(str(error))):
            return error  # it died for a reason that is not known
        expected = f", and {format_size(planned)} are needed by the plan" if planned is not None else ""
        return OutOfMemory(
            f"{PREFIX}: nothing fits in {format_size(self._limit)} a rank{expected}: in {world.name}, with a "
            f"microbatch of {micro}, {str(error).partition(chr(10))[0]}"
        )

    def _run(
        self, settled: SettledConfig, backend: Backend, entry: str, wanted: Mapping[str, Any], *, ranks: int
    ) -> Path:
        """Run a world to its end, and return its folder; raise the error with which it ended."""
        self._number += 1
        run = self._folder / f"trial-{self._number}"
        texts = settled.texts({**self._code.to_json(), **wanted})
        limits = settled.config.launch
        with (
            folder.create_run_folder(run, *texts, overwrite=False),
            backend.host(settled.config, ranks) if "trial" in wanted else nullcontext({}) as hosted,
            WorkerGroup(
                run,
                ranks,
                entry,
                environment={**self._environment, **hosted},
                heartbeat=limits.heartbeat if "trial" in wanted else None,
                timeout=limits.timeout,
                waits=backend.capabilities.waits,
                pickled_task=self._code.ref.pickled_task if self._code.ref is not None else b"",
                starter=self._server.starter_of(backend),
            ) as workers,
        ):
            while not workers.poll(SECONDS_BETWEEN_LOOKS):
                self._look()
        return run


def ended_for_lack_of_memory(error: UniparError) -> bool:
    """Return whether a trial ended because memory ran out, or was killed, which may be for that reason."""
    if isinstance(error, OutOfMemory):
        return True
    if not isinstance(error, WorkerFailed) or isinstance(error, Hung):
        return False
    return mentions_out_of_memory(f"{error} {error.traceback}") or " was killed by SIG" in str(error)


def _without_extras(settled: SettledConfig) -> SettledConfig:
    """Return the config without what a trial must not do: evaluate, write elsewhere, go on from a checkpoint."""
    changes: dict[str, Any] = {"eval": Eval(), "log.to": (), "log.memory": False, "log.trace": None}
    changes |= {"resume": None, "out": None, "launch.deadline": None, "launch.restarts": 0}
    if settled.config.checkpoint is not None:
        changes |= {"checkpoint.every": None, "checkpoint.best": None, "checkpoint.to": None}
    return settled.changed(changes)
