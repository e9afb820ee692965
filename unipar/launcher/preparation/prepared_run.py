"""`PreparedRun`: a run that can start, and the checks that only a run needs."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from unipar.backend import Backend, checks
from unipar.backend.installed import library_versions, machine_summary
from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint
from unipar.checkpoint.starting_points import (
    check_start,
    configured_folder,
    describe_finished_run,
    refuse_lost_checkpoints,
)
from unipar.checkpoint.storage.remote import open_file_system
from unipar.config import Config
from unipar.config.config_source import ConfigSource
from unipar.config.settled import SettledConfig
from unipar.distributed.place import Place
from unipar.distributed.restarts import LaunchedJob, find_job
from unipar.errors import ConfigError, UniparError, WorldMismatch
from unipar.launcher.micro_batch.choice import (
    PREFIX,
    CandidateWorld,
    ChosenMicro,
    name_of_world,
    usable_memory,
)
from unipar.launcher.preparation.earlier_config import (
    describe_changed_config,
    given_config,
    kept_keys,
    list_changed_values,
)
from unipar.launcher.preparation.prepare import Prepared
from unipar.run_folder import folder
from unipar.run_folder.layout import read_launch_file
from unipar.task.reference import TaskRef
from unipar.tracking.tracker import require_tracker
from unipar.utils.address import is_address, parse_address, parse_location
from unipar.utils.files import relative_path
from unipar.utils.procfs import boot_id

DEBUG_TIMEOUT_SECONDS = 7 * 24 * 3600.0
"""Seconds that ranks wait for one that is at a debugger's prompt."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start: settled config, backend, run folder, place and task."""

    settled: SettledConfig
    backend: Backend
    out: Path
    """Run folder; where it is `numbered`, the first that is free now, until `create_folder` has claimed one."""

    overwrite: bool
    place: Place | None
    """Place of this process in the world that a foreign launcher made; None: unipar starts the ranks."""

    ref: TaskRef | None
    """Reference to the task's code; None for a loop in the user's own script, which workers run again."""

    why: str = ""
    """Reason for the number of ranks, or for the device; empty if the config says both."""

    given_keys: tuple[str, ...] = ()
    """Keys of the config that the command or the call has given, which a checkpoint's may differ from."""

    numbered: Path | None = None
    """First of the names of which the run takes one that is free: the config gives no `out`. None: `out` is the one."""

    job: tuple[str, ...] = ()
    """Names of the launcher's or scheduler's job, by which a restart finds the folder of its first attempt."""

    source: ConfigSource | None = None
    """Config as it was given, with the origin of each key; None in a run that a test has made."""

    goes_on: bool = False
    """Whether the run goes on in the folder of an earlier one."""

    finished: str = ""
    """Sentence that says that the earlier run has done all its steps, so that nothing is to be started; else ""."""

    auto: CandidateWorld | None = None
    """World in which `batch.micro: auto` is still to be found by trial; the config has the smallest size instead."""

    micro: ChosenMicro | None = None
    """Microbatch that was found by trial; None if the config says it, or if it is still to be found."""

    micro_note: str = ""
    """Sentence on `batch.micro: auto` in a run that goes on: whether the size of the earlier run is kept."""

    remote_ranks: tuple[int, ...] = ()
    """Ranks on machines that do not see rank 0's run folder, and have one of their own."""

    debug_rank: int | None = None
    """Rank in which a debugger may take the terminal, as the command or the call says."""

    launched: float = field(default_factory=time.monotonic)
    """Time of time.monotonic() from which `launch.deadline` counts; a restart does not change it."""

    @classmethod
    def of(cls, prepared: Prepared, *, overwrite: bool, restarts: int = 0) -> Self:
        """Return the run if it can start; raise an error with the reason if it cannot.

        `restarts`: how often the launcher has started its ranks again, as far as any rank knows.
        """
        checks.check_run_settings(prepared.source, "" if prepared.place is None else prepared.place.launcher)
        auto, sizes = prepared.source.config.batch.is_auto, list[int]()
        if auto:
            sizes = prepared.candidates(prepared.ranks().number)
            prepared = prepared.with_micro(sizes[0])
        source, place = prepared.source, prepared.place
        config, job, earlier = source.config, find_job(restarts=restarts), None
        if job.restarted_by:
            earlier = folder.newest_run_folder(source.out, alone=config.out is not None, job=job.restarted_names)
        elif config.resume == "auto":
            earlier = folder.newest_run_folder(source.out, alone=config.out is not None)
        numbered = source.out if config.out is None and (earlier is not None or not overwrite) else None
        out = earlier or (source.out if numbered is None else folder.first_free_folder(numbered))
        wanted = _resume_of_restart(config, job) if job.restarted_by and config.resume is None else config.resume
        settled, ranks = checks.settle_run(source, prepared.device, place, {"out": str(out), "resume": wanted})
        for tracker in config.log.to:
            require_tracker(tracker)
        _require_file_systems(config)
        if overwrite and config.resume == "auto":
            raise ConfigError(
                "resume: auto (--resume) goes on in a run's folder, and --overwrite deletes what is in it: leave out "
                "one of them, or begin anew with --overwrite and --set resume=never"
            )
        keys = tuple(key for key, origin in source.origins.items() if origin in ("--set", "--out", "overrides"))
        finished = describe_finished_run(out, config) if earlier is not None and wanted != "never" else ""
        if finished and (newer := folder.newer_run_without_step(source.out, out, alone=config.out is not None)):
            finished += f"; {relative_path(newer)} was begun later and has ended before its first step"
        if place is None or place.rank == 0:
            if earlier is None:
                if wanted not in (None, "auto", "never"):
                    check_start(wanted, config, keys, out if overwrite else None)
                folder.check_run_folder(out, overwrite=overwrite)
            elif wanted != "never" and not finished:
                refuse_lost_checkpoints(out, config)
        why = ranks.why or prepared.why
        run = cls(settled, source.backend, out, overwrite, place, prepared.ref, why, keys, numbered, job.names, source)
        if earlier is not None:
            launched = folder.launch_time(earlier) if job.same_clock else None
            launched = run.launched if launched is None else launched
            run = replace(run, goes_on=True, finished=finished, launched=launched)
        return run._with_candidates(sizes) if auto and not finished else run

    def _with_candidates(self, sizes: Sequence[int]) -> Self:
        """Return the run with the microbatch of the run that it continues, or with the sizes to choose from."""
        settled, limit = self.settled, usable_memory(self.config, self.size)
        earlier = ChosenMicro.of_run(self.out) if self.goes_on and self.config.resume != "never" else None
        note = ""
        if earlier is not None:
            here = [name_of_world(settled.strategy, settled.ranks)]
            why = earlier.why_not_kept(here, settled.sizes.total, settled.device, limit)
            if not why:
                return replace(self.with_micro(earlier), micro_note=f"{PREFIX}: {earlier.micro}, as before")
            note = f"{PREFIX}: was {earlier.micro}, and is found again: {why}"
        if self.place is not None:
            raise WorldMismatch(
                f"{PREFIX} is found by trials in processes that unipar starts, and {self.place.launcher} has started "
                "these: start the run once with python, or `unipar run`, and write the size that it tells into "
                "batch.micro; `unipar plan FILE --memory SIZE` tells what to expect"
            )
        return replace(self, auto=CandidateWorld(settled, self.backend, sizes), micro_note=note)

    def with_micro(self, micro: ChosenMicro) -> Self:
        """Return the run with the microbatch that was found."""
        settled = self.settled.changed({"batch.micro": micro.micro})
        return replace(self, settled=settled, micro=micro, auto=None)

    def in_folder(self, out: Path) -> Self:
        """Return the same run with this run folder."""
        settled = replace(self.settled, config=self.settled.config.changed({"out": str(out)}))
        return replace(self, out=out, settled=settled)

    def for_debugging(self, rank: int | None) -> Self:
        """Return the run whose other ranks wait for this one while it is at a debugger's prompt; None: no such rank."""
        if rank is None:
            return self
        if self.place is not None:
            raise WorldMismatch(
                f"--debug-rank (debug_rank=): {self.place.launcher} has started the ranks, and unipar gives the "
                "terminal only to ranks that it starts itself: start it with python, or `unipar run`"
            )
        if not 0 <= rank < self.size:
            raise ConfigError(f"--debug-rank (debug_rank=) {rank}: the run has the ranks 0 to {self.size - 1}")
        if not os.isatty(0):
            raise ConfigError(
                f"--debug-rank (debug_rank=) {rank}: standard input is not a terminal; start the command in one, "
                "without a pipe"
            )
        waits = {"launch.timeout": max(self.config.launch.timeout, DEBUG_TIMEOUT_SECONDS)}
        return replace(self, debug_rank=rank, settled=self.settled.changed(waits))

    @property
    def rank_with_terminal(self) -> int | None:
        """Rank in which a debugger takes the terminal: the one that was named, or the only one; None: no rank."""
        return 0 if self.debug_rank is None and self.size == 1 and os.isatty(0) else self.debug_rank

    def after(self, launches: Sequence[str]) -> Self:
        """Return the same run, with the results of earlier launches of the same script for its workers."""
        return self if self.ref is None else replace(self, ref=replace(self.ref, earlier=tuple(launches)))

    @property
    def config(self) -> Config:
        """Config with the number of ranks settled."""
        return self.settled.config

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.settled.ranks

    @contextmanager
    def create_folder(self, script: Sequence[str] = ()) -> Generator[Self]:
        """Context manager: creates the run folder and locks it for this run; yields the run with that folder."""
        assert self.auto is None, "batch.micro: auto must be found before the run begins"
        if self.goes_on:
            anew = self.config.resume == "never"
            with folder.continue_run_folder(self.out, *self._file_texts(script), anew=anew):
                yield self
            return
        if self.numbered is None:
            with folder.create_run_folder(self.out, *self._file_texts(script), overwrite=self.overwrite):
                yield self
            return
        with folder.claim_run_folder(self.numbered) as out:
            run = self.in_folder(out)
            folder.write_run_files(out, *run._file_texts(script))
            yield run

    def next_attempt(self, script: Sequence[str], error: UniparError) -> Self:
        """Make the folder ready for another attempt after this error, and return that attempt's run."""
        settled = self.settled
        if self.config.resume is None:
            settled = replace(settled, config=settled.config.changed({"resume": "auto"}))
        run = replace(self, settled=settled, goes_on=True)
        ended = {"kind": type(error).__name__, "message": str(error), "time": time.time()}
        folder.begin_next_attempt(self.out, *run._file_texts(script), ended, anew=self.config.resume == "never")
        return run

    def describe_start(self) -> str:
        """Return from where a further attempt begins."""
        if self.config.resume == "never":
            return "it begins anew (resume: never)"
        checkpoints = find_checkpoints(configured_folder(self.out, self.config))
        if checkpoints:
            return f"it goes on from its newest whole checkpoint, of step {checkpoints[0].step} or before"
        if self.config.resume not in (None, "auto"):
            return f"it begins again from {self.config.resume}, as it has no checkpoint of its own yet"
        saves = self.config.checkpoint is not None
        return "it begins anew, " + ("as it has no checkpoint yet" if saves else "without a section checkpoint")

    def _own_folder(self) -> str:
        """Return the name of the run's folder below `checkpoint.to`: another for each run, the same when it goes on.

        "" for a run that an older unipar has begun: its checkpoints are in `checkpoint.to` itself.
        """
        if self.goes_on and self.config.resume != "never":
            return read_launch_file(self.out).get("checkpoints", "")
        return f"{self.out.name}-{secrets.token_hex(4)}"

    def _file_texts(self, script: Sequence[str]) -> tuple[str, str]:
        """Return the texts of config.json and launch.json."""
        launch: dict[str, Any] = {"script": list(script)} if self.ref is None else {"task": self.ref.to_json()}
        ran = {"versions": library_versions(self.backend.requires), "machine": machine_summary()}
        launch |= {"boot": boot_id(), "said": list(self.given_keys)}
        launch |= {"launched": self.launched, "ranks": self.size, "job": list(self.job)}
        launch["checkpoints"] = self._own_folder()
        if self.micro is not None:
            launch["micro"] = self.micro.to_json()
        if self.source is not None:
            launch |= {"given": given_config(self.source)} | self._changes(self.source)
        return self.settled.texts(launch | ran)

    def _changes(self, source: ConfigSource) -> dict[str, Any]:
        """Return for launch.json how the config differs from that of the run, or the state, that this goes on from."""
        wanted, settled = self.config.resume, self.settled
        if wanted == "never" or not (self.goes_on or wanted not in (None, "auto")):
            return {}
        if self.goes_on:
            before = json.loads((self.out / "config.json").read_bytes())
        else:
            before = inspect_checkpoint(parse_location(str(wanted))).state["config"]
        changes = list_changed_values(before, settled, source.origins, of_state=not self.goes_on)
        lines = describe_changed_config(changes, kept_keys(source), self.config)
        return {"changes": [change._asdict() for change in changes], "lines": [*lines]}


def _resume_of_restart(config: Config, job: LaunchedJob) -> str:
    """Return `resume` for a job that its launcher has started again; raise ConfigError if nothing was saved."""
    if config.checkpoint is None:
        raise ConfigError(
            f"{job.restarted_by}, and its config has no section checkpoint, so there is no state to go on from: give "
            "it the section, or `resume: never`, which begins anew each time"
        )
    return "auto"


def _require_file_systems(config: Config) -> None:
    """Raise CheckpointError if a package is missing for an address that the config names."""
    for text in (config.checkpoint.to if config.checkpoint else None, config.resume):
        if text is not None and is_address(text):
            open_file_system(parse_address(text))
