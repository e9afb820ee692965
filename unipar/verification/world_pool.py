"""Worlds for jobs: forked from one process that has imported what takes long, one for each library and its options."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.backend import Backend, registry
from unipar.errors import Stopped, UniparError, WorkerFailed, rebuild
from unipar.launcher.processes.forkserver import ForkServer
from unipar.launcher.processes.group import WorkerGroup
from unipar.task.reference import TaskRef
from unipar.verification.worker.jobs import JOBS_ENTRY, JOBS_FILE_NAME, Job, RunKey, job_result_path

JobResult = list[dict[str, Any]] | UniparError
"""What each rank wrote down, or why the run came to nothing."""

OnResult = Callable[[RunKey, JobResult], None]
"""Called with each job's key and result when it is there."""


@dataclass
class _RunningWorld:
    """One crew at work, and how far it has come."""

    group: WorkerGroup
    folder: Path
    jobs: Sequence[Job]
    size: int
    done: int = 0
    died: bool = False
    """Then its folder stays, for the logs that the error names."""


class WorldPool:
    """Enter it; then `play` jobs."""

    def __init__(self, folder: Path, ref: TaskRef, zygote: ForkServer, threads: int) -> None:
        self._folder, self._ref, self._zygote, self._threads = folder, ref, zygote, threads
        self._number = 0

    def run_jobs(
        self, batches: Iterable[Sequence[Job]], said: OnResult, side_by_side: int = 1
    ) -> dict[RunKey, JobResult]:
        """Each batch of jobs in a world of its own, some at a time; what a dead world leaves undone has another."""
        waiting = [list(jobs) for jobs in batches if jobs]
        found: dict[RunKey, JobResult] = {}
        while waiting:
            now, waiting = waiting[:side_by_side], waiting[side_by_side:]
            left = self._run_side_by_side(now, found, said)
            waiting = left + waiting
        return found

    def _run_side_by_side(
        self, batches: list[list[Job]], found: dict[RunKey, JobResult], said: OnResult
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
                    self._collect(world, found, said)
                    if ended:
                        going.remove(world)
                        left += self._close_world(world, fault, found, said)
        finally:
            for world in worlds:
                world.group.__exit__()
                if not world.died:
                    shutil.rmtree(world.folder, ignore_errors=True)
        return left

    def _create_world(self, jobs: Sequence[Job]) -> _RunningWorld:
        self._number += 1
        folder = self._folder / f"world-{self._number}"
        folder.mkdir(parents=True)
        told = {"task": self._ref.to_json(), "jobs": [job.to_json() for job in jobs]}
        (folder / JOBS_FILE_NAME).write_text(json.dumps(told), encoding="utf-8")
        settled = jobs[0].settled
        crew = WorkerGroup.of(
            settled,
            registry.find_backend(settled.cell.backend),
            folder,
            JOBS_ENTRY,
            {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads))},
            parcel=self._ref.parcel,
            zygote=self._zygote,
        )
        return _RunningWorld(crew, folder, jobs, settled.ranks)

    def _collect(self, world: _RunningWorld, found: dict[RunKey, JobResult], said: OnResult) -> None:
        """What has come since the last look."""
        import torch

        while world.done < len(world.jobs):
            files = [job_result_path(world.folder, world.done, rank) for rank in range(world.size)]
            if not all(file.exists() for file in files):
                return
            ranks: list[dict[str, Any]] = [torch.load(file, weights_only=True) for file in files]
            for file in files:
                file.unlink()
            self._note_result(world.jobs[world.done].key, _result_or_error(ranks), found, said)
            world.done += 1

    def _close_world(
        self, world: _RunningWorld, fault: UniparError | None, found: dict[RunKey, JobResult], said: OnResult
    ) -> list[list[Job]]:
        if world.done == len(world.jobs):
            return []
        key = world.jobs[world.done].key
        self._note_result(key, fault or WorkerFailed(f"the world of {key} ended without a result"), found, said)
        rest = list(world.jobs[world.done + 1 :])
        return [rest] if rest else []

    def _note_result(self, key: RunKey, result: JobResult, found: dict[RunKey, JobResult], said: OnResult) -> None:
        found[key] = result
        said(key, result)


def _result_or_error(ranks: list[dict[str, Any]]) -> JobResult:
    for rank in ranks:
        if "error" in rank:
            return rebuild(rank["kind"], rank["error"]) or WorkerFailed(rank["error"])
    return ranks


def group_jobs_by_library(jobs: Iterable[Job]) -> list[list[Job]]:
    """By library and what it is told when its world is made."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        config = job.settled.config
        told = config.backend, config.device, config.options.get(config.backend, {})
        found.setdefault(json.dumps(told, sort_keys=True), []).append(job)
    return list(found.values())


@contextmanager
def open_world_pool(folder: Path, ref: TaskRef, names: Iterable[str], threads: int) -> Generator[WorldPool]:
    """One process imports what all these backends need; workers are its forks."""
    backends = {name: registry.find_backend(name) for name in names}
    with ForkServer(sorted({module for b in backends.values() for module in _modules_to_import(b)})) as zygote:
        yield WorldPool(folder, ref, zygote, threads)


def _modules_to_import(backend: Backend) -> list[str]:
    home = type(backend).__module__
    return [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "unipar.verification.worker.entry",
        *_engine_module(home),
    ]


def _engine_module(home: str) -> list[str]:
    from importlib.util import find_spec

    return [f"{home}.engine"] if find_spec(f"{home}.engine") is not None else []
