"""Inside a world: its jobs, one after another; what each gave goes into the folder."""

from __future__ import annotations

import contextlib
import json
import socket
import warnings
from pathlib import Path
from typing import Any

import torch

from unipar.backend import Backend, registry
from unipar.config import Config
from unipar.data.dataset import source_of
from unipar.data.feed import Feed
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.errors import UniparError
from unipar.run_folder.heartbeat import Heart
from unipar.run_folder.layout import beat_of, ledger_of
from unipar.run_folder.ledger import Ledger
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.tracking.writer import Trackers
from unipar.training.run import TrainingRun
from unipar.training.setup import assembled
from unipar.utils.files import whole
from unipar.verification.worker import replay
from unipar.verification.worker.fixed_stream import held
from unipar.verification.worker.jobs import JOBS, Job, result_of
from unipar.verification.worker.recorder import Notebook
from unipar.verification.worker.task_probe import calmed, looked


class Enough(BaseException):
    """The task's loop has done the steps that were asked for."""


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """A worker's entry: all jobs of this world."""
    warnings.filterwarnings("ignore")  # said once already, where the same task trains
    told = json.loads((folder / JOBS).read_text("utf-8"))
    ref = TaskRef.from_json(told["task"])
    jobs = [Job.from_json(job) for job in told["jobs"]]
    first = jobs[0].settled
    backend = registry.find(first.cell.backend)
    world = backend.join(first.config, place)
    heart = Heart(beat_of(folder, place.rank))
    for i, job in enumerate(jobs):
        result = _attempt(job, backend, ref, world, folder, heart)
        with whole(result_of(folder, i, place.rank)) as path:
            torch.save(result, path)
        world.barrier()
    world.close()


def _attempt(job: Job, backend: Backend, ref: TaskRef, world: World, folder: Path, heart: Heart) -> dict[str, Any]:
    """What a job gave, or the error that every rank met alike; any other error ends the world."""
    try:
        return _done(job, backend, ref, world, folder, heart)
    except UniparError as e:
        return {"error": str(e), "kind": type(e).__name__}


def _done(job: Job, backend: Backend, ref: TaskRef, world: World, folder: Path, heart: Heart) -> dict[str, Any]:
    settled = job.settled
    task = ref.load()
    quiet = calmed(task) if job.calm else []
    settled, again = held(task, settled, job.steps)
    if job.kind == "look":
        found = {"quiet": quiet, "stream": again is not None, **looked(task, settled, world)}
        return found | {"again": found["again"] and again is not False}
    build = replay.build(job.ranks, job.order, apart=job.apart) if job.kind == "replay" else None
    with Ledger(ledger_of(folder, world.rank)) as ledger:
        trackers = Trackers((), folder, world.rank)
        live = assembled(settled, backend, task, world, ledger=ledger, heart=heart, trackers=trackers, build=build)
        book = Notebook(job.trace_at)
        for name, part in live.parts.items():
            part.engine = book.watch("" if len(live.parts) == 1 else f"{name}.", part.engine)
        book.open()
        if job.kind == "replay":
            live.read_from(_everybodys(task, settled.config, job.ranks))
        _train(task, live, job.steps)
        heart.mark("start")  # what follows has no steps
        made = {
            "steps": book.steps,
            "states": book.states,
            "traced": book.traced,
            "shares": _shares(book),
            "groups": [
                {**group, "prefix": prefix, "names": [prefix + name for name in group["names"]]}
                for prefix, engine in book.engines.items()
                if isinstance(engine, replay.Replay)
                for group in engine.groups()
            ],
            "pieces": [
                (p.name, p.kind, p.shape, p.where, p.tensor.detach().flatten().cpu().clone()) for p in book.pieces()
            ],
        }
        for engine in book.engines.values():
            engine.close()
    return made


def _shares(book: Notebook) -> list[dict[str, Any]]:
    """Of a replay, what each step was added up from."""
    kept = {prefix: iter(e.shares) for prefix, e in book.engines.items() if isinstance(e, replay.Replay) and e.shares}
    if not kept:
        return []
    rows = [(step["prefix"], next(kept[step["prefix"]])) for step in book.steps]
    return [
        {**row, "parts": {k: {prefix + n: s for n, s in grads.items()} for k, grads in row["parts"].items()}}
        for prefix, row in rows
    ]


def _everybodys(task: Task, config: Config, ranks: int) -> Feed:
    """The microbatches of all ranks, in the order in which a replay takes them."""
    sizes = config.batch.settle(ranks)
    source = source_of(task.data(), task.collate if task.gives("collate") else None, task.collate, config, sizes)
    return Feed(source, sizes, None, config.train.seed)


def _train(task: Task, live: TrainingRun, steps: int) -> None:
    """The task's own loop, left after so many steps."""

    def enough(done: int) -> None:
        if done >= steps:
            raise Enough

    live.gate(enough)
    with contextlib.suppress(Enough):
        task.train(live)
    live.finish()
