"""Worlds that run the jobs of a verification, forked from one process that has imported all libraries."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.backend import registry
from unipar.distributed.accelerators import VISIBLE_DEVICES_VARIABLE
from unipar.errors import Stopped, UniparError, WorkerFailed, rebuild
from unipar.launcher.processes import starters
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.process import SubprocessStarter, WorkerStarter
from unipar.task.reference import TaskRef
from unipar.verification.numbers import DeviceNumbers
from unipar.verification.worker.jobs import JOBS_ENTRY, JOBS_FILE_NAME, Job, RunKey, job_result_path

JobResult = list[dict[str, Any]] | UniparError
"""Result of a job: what each rank recorded, or the error that ended the run."""

OnResult = Callable[[RunKey, JobResult], None]
"""Callback for each job's key and result, as soon as the job is done."""


@dataclass
class _RunningWorld:
    """Running group of workers, its jobs, and how many of them are done."""

    group: WorkerGroup
    folder: Path
    jobs: Sequence[Job]
    size: int
    done: int = 0
    died: bool = False
    """Whether the group failed; its folder is then kept, because the error names logs in it."""


class WorldPool:
    """Worlds that run jobs; workers are forks of `fork_server`, each with `threads` threads."""

    def __init__(self, folder: Path, ref: TaskRef, fork_server: WorkerStarter, threads: int) -> None:
        self.folder, self._ref, self._fork_server, self._threads = folder, ref, fork_server, threads
        self._number = 0
        self.numbers: DeviceNumbers | None = None
        """Settings that decide the last digits on the device of all further worlds; None on the CPU."""

    def run_jobs(
        self, batches: Iterable[Sequence[Job]], on_result: OnResult, side_by_side: int = 1
    ) -> dict[RunKey, JobResult]:
        """Run each batch of jobs in a world of its own; jobs that a failed world leaves undone run in a new one."""
        waiting = [list(jobs) for jobs in batches if jobs]
        results: dict[RunKey, JobResult] = {}
        while waiting:
            now, waiting = waiting[:side_by_side], waiting[side_by_side:]
            left = self._run_side_by_side(now, results, on_result)
            waiting = left + waiting
        return results

    def _run_side_by_side(
        self, batches: list[list[Job]], results: dict[RunKey, JobResult], on_result: OnResult
    ) -> list[list[Job]]:
        worlds: list[_RunningWorld] = []
        left: list[list[Job]] = []
        try:
            for jobs in batches:
                opened = self._create_world(jobs)
                worlds.append(opened)
                opened.group.__enter__()
            going = list(worlds)
            while going:
                for world in list(going):
                    fault: UniparError | None = None
                    try:
                        ended = world.group.poll(0.1 / len(going))
                    except Stopped:
                        raise
                    except UniparError as e:
                        ended, fault, world.died = True, e, True
                    self._collect(world, results, on_result)
                    if ended:
                        going.remove(world)
                        left += self._close_world(world, fault, results, on_result)
        finally:
            for world in worlds:
                world.group.__exit__()
                if not world.died:
                    shutil.rmtree(world.folder, ignore_errors=True)
        return left

    def _create_world(self, jobs: Sequence[Job]) -> _RunningWorld:
        self._number += 1
        folder = self.folder / f"world-{self._number}"
        folder.mkdir(parents=True)
        strict = None if self.numbers is None else self.numbers.repeats_bits
        content = {"task": self._ref.to_json(), "jobs": [job.to_json() for job in jobs], "strict": strict}
        (folder / JOBS_FILE_NAME).write_text(json.dumps(content), encoding="utf-8")
        settled = jobs[0].settled
        group = WorkerGroup.of(
            settled,
            registry.find_backend(settled.strategy.backend),
            folder,
            JOBS_ENTRY,
            {
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads)),
                **({} if self.numbers is None else self.numbers.variables()),
            },
            pickled_task=self._ref.pickled_task,
            starter=self._fork_server,
        )
        return _RunningWorld(group, folder, jobs, settled.ranks)

    def _collect(self, world: _RunningWorld, results: dict[RunKey, JobResult], on_result: OnResult) -> None:
        """Read the results that all ranks of the world have written since the last call."""
        from unipar.verification.worker.recorded import read_recorded

        while world.done < len(world.jobs):
            files = [job_result_path(world.folder, world.done, rank) for rank in range(world.size)]
            if not all(file.exists() for file in files):
                return
            ranks: list[dict[str, Any]] = [read_recorded(file) for file in files]
            for file in files:
                file.unlink()
            self._note_result(world.jobs[world.done].key, _result_or_error(ranks), results, on_result)
            world.done += 1

    def _close_world(
        self, world: _RunningWorld, fault: UniparError | None, results: dict[RunKey, JobResult], on_result: OnResult
    ) -> list[list[Job]]:
        if world.done == len(world.jobs):
            return []
        key = world.jobs[world.done].key
        self._note_result(key, fault or WorkerFailed(f"the world of {key} ended without a result"), results, on_result)
        rest = list(world.jobs[world.done + 1 :])
        return [rest] if rest else []

    def _note_result(
        self, key: RunKey, result: JobResult, results: dict[RunKey, JobResult], on_result: OnResult
    ) -> None:
        results[key] = result
        on_result(key, result)


def _result_or_error(ranks: list[dict[str, Any]]) -> JobResult:
    for rank in ranks:
        if "error" in rank:
            return rebuild(rank["kind"], rank["error"]) or WorkerFailed(rank["error"])
    return ranks


def group_jobs_by_library(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in groups that can share a world: same backend, its options, device and axes of the mesh."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        config = job.settled.config
        joined_with = config.backend, config.device, config.options.get(config.backend, {}), config.parallel.axes.sizes
        groups.setdefault(json.dumps(joined_with, sort_keys=True), []).append(job)
    return list(groups.values())


@contextmanager
def open_world_pool(
    folder: Path,
    ref: TaskRef,
    names: Iterable[str],
    threads: int,
    device: str = "cpu",
    starter: WorkerStarter | None = None,
) -> Generator[WorldPool]:
    """Context manager: start a process that imports all these backends; yield a pool that forks workers from it.

    With a `starter`, that one starts the workers instead; on a device other than the CPU each is a new interpreter.
    """
    if starter is not None:
        yield WorldPool(folder, ref, starter, threads)
        return
    backends = [registry.find_backend(name) for name in names]
    modules = starters.modules_to_import(backends, ["unipar.verification.worker.entry"])
    if device != "cpu":  # CUDA does not survive a fork
        yield WorldPool(folder, ref, SubprocessStarter(), threads)
        return
    # a library that chooses its device when it is imported must not see a GPU if the ranks compute on the CPU
    environment = {VISIBLE_DEVICES_VARIABLE: ""}
    with starters.ForkServer(modules, environment) as server:
        server.wait_until_ready()
        yield WorldPool(folder, ref, server, threads)
