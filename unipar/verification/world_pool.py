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
from unipar.launcher.processes.forkserver import Zygote
from unipar.launcher.processes.group import Crew
from unipar.task.reference import TaskRef
from unipar.verification.worker.jobs import ENTRY, JOBS, Job, RunKey, result_of

Result = list[dict[str, Any]] | UniparError
"""What each rank wrote down, or why the run came to nothing."""

Said = Callable[[RunKey, Result], None]
"""Called with each job's key and result when it is there."""


@dataclass
class _World:
    """One crew at work, and how far it has come."""

    crew: Crew
    folder: Path
    jobs: Sequence[Job]
    size: int
    done: int = 0
    died: bool = False
    """Then its folder stays, for the logs that the error names."""


class Worlds:
    """Enter it; then `play` jobs."""

    def __init__(self, folder: Path, ref: TaskRef, zygote: Zygote, threads: int) -> None:
        self._folder, self._ref, self._zygote, self._threads = folder, ref, zygote, threads
        self._number = 0

    def play(self, batches: Iterable[Sequence[Job]], said: Said, side_by_side: int = 1) -> dict[RunKey, Result]:
        """Each batch of jobs in a world of its own, some at a time; what a dead world leaves undone has another."""
        waiting = [list(jobs) for jobs in batches if jobs]
        found: dict[RunKey, Result] = {}
        while waiting:
            now, waiting = waiting[:side_by_side], waiting[side_by_side:]
            left = self._together(now, found, said)
            waiting = left + waiting
        return found

    def _together(self, batches: list[list[Job]], found: dict[RunKey, Result], said: Said) -> list[list[Job]]:
        worlds: list[_World] = []
        left: list[list[Job]] = []
        try:
            for jobs in batches:
                opened = self._begun(jobs)
                worlds.append(opened)
                opened.crew.__enter__()
            going = list(worlds)
            while going:
                for world in list(going):
                    fault: UniparError | None = None
                    try:
                        ended = world.crew.poll(0.1 / len(going))
                    except Stopped:
                        raise
                    except UniparError as e:
                        ended, fault, world.died = True, e, True
                    self._collect(world, found, said)
                    if ended:
                        going.remove(world)
                        left += self._ended(world, fault, found, said)
        finally:
            for world in worlds:
                world.crew.__exit__()
                if not world.died:
                    shutil.rmtree(world.folder, ignore_errors=True)
        return left

    def _begun(self, jobs: Sequence[Job]) -> _World:
        self._number += 1
        folder = self._folder / f"world-{self._number}"
        folder.mkdir(parents=True)
        told = {"task": self._ref.to_json(), "jobs": [job.to_json() for job in jobs]}
        (folder / JOBS).write_text(json.dumps(told), encoding="utf-8")
        settled = jobs[0].settled
        crew = Crew.of(
            settled,
            registry.find(settled.cell.backend),
            folder,
            ENTRY,
            {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads))},
            parcel=self._ref.parcel,
            zygote=self._zygote,
        )
        return _World(crew, folder, jobs, settled.ranks)

    def _collect(self, world: _World, found: dict[RunKey, Result], said: Said) -> None:
        """What has come since the last look."""
        import torch

        while world.done < len(world.jobs):
            files = [result_of(world.folder, world.done, rank) for rank in range(world.size)]
            if not all(file.exists() for file in files):
                return
            ranks: list[dict[str, Any]] = [torch.load(file, weights_only=True) for file in files]
            for file in files:
                file.unlink()
            self._found(world.jobs[world.done].key, _result(ranks), found, said)
            world.done += 1

    def _ended(
        self, world: _World, fault: UniparError | None, found: dict[RunKey, Result], said: Said
    ) -> list[list[Job]]:
        if world.done == len(world.jobs):
            return []
        key = world.jobs[world.done].key
        self._found(key, fault or WorkerFailed(f"the world of {key} ended without a result"), found, said)
        rest = list(world.jobs[world.done + 1 :])
        return [rest] if rest else []

    def _found(self, key: RunKey, result: Result, found: dict[RunKey, Result], said: Said) -> None:
        found[key] = result
        said(key, result)


def _result(ranks: list[dict[str, Any]]) -> Result:
    for rank in ranks:
        if "error" in rank:
            return rebuild(rank["kind"], rank["error"]) or WorkerFailed(rank["error"])
    return ranks


def grouped(jobs: Iterable[Job]) -> list[list[Job]]:
    """By library and what it is told when its world is made."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        config = job.settled.config
        told = config.backend, config.device, config.options.get(config.backend, {})
        found.setdefault(json.dumps(told, sort_keys=True), []).append(job)
    return list(found.values())


@contextmanager
def worlds(folder: Path, ref: TaskRef, names: Iterable[str], threads: int) -> Generator[Worlds]:
    """One process imports what all these backends need; workers are its forks."""
    backends = {name: registry.find(name) for name in names}
    with Zygote(sorted({module for b in backends.values() for module in _modules(b)})) as zygote:
        yield Worlds(folder, ref, zygote, threads)


def _modules(backend: Backend) -> list[str]:
    home = type(backend).__module__
    return ["torch", "torch._dynamo", "torch.distributed.fsdp", "unipar.verification.worker.entry", *_engine(home)]


def _engine(home: str) -> list[str]:
    from importlib.util import find_spec

    return [f"{home}.engine"] if find_spec(f"{home}.engine") is not None else []
