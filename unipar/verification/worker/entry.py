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
from unipar.data.dataset import data_source_of
from unipar.data.feed import MicrobatchFeed
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.errors import UniparError
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, ledger_path
from unipar.run_folder.ledger import Ledger
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.tracking.writer import TrackerWriter
from unipar.training.run import TrainingRun
from unipar.training.setup import build_run
from unipar.utils.files import whole
from unipar.verification.worker import replay
from unipar.verification.worker.fixed_stream import fix_stream_samples
from unipar.verification.worker.jobs import JOBS_FILE_NAME, Job, job_result_path
from unipar.verification.worker.recorder import RunRecorder
from unipar.verification.worker.task_probe import disable_dropout, probe_task


class StepsDone(BaseException):
    """The task's loop has done the steps that were asked for."""


def run_world_jobs(place: Place, folder: Path, control: socket.socket | None) -> None:
    """A worker's entry: all jobs of this world."""
    warnings.filterwarnings("ignore")  # said once already, where the same task trains
    told = json.loads((folder / JOBS_FILE_NAME).read_text("utf-8"))
    ref = TaskRef.from_json(told["task"])
    jobs = [Job.from_json(job) for job in told["jobs"]]
    first = jobs[0].settled
    backend = registry.find_backend(first.cell.backend)
    world = backend.join(first.config, place)
    heart = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for i, job in enumerate(jobs):
        result = _run_job_or_error(job, backend, ref, world, folder, heart)
        with whole(job_result_path(folder, i, place.rank)) as path:
            torch.save(result, path)
        world.barrier()
    world.close()


def _run_job_or_error(
    job: Job, backend: Backend, ref: TaskRef, world: World, folder: Path, heart: HeartbeatWriter
) -> dict[str, Any]:
    """What a job gave, or the error that every rank met alike; any other error ends the world."""
    try:
        return _run_job(job, backend, ref, world, folder, heart)
    except UniparError as e:
        return {"error": str(e), "kind": type(e).__name__}


def _run_job(
    job: Job, backend: Backend, ref: TaskRef, world: World, folder: Path, heart: HeartbeatWriter
) -> dict[str, Any]:
    settled = job.settled
    task = ref.load()
    quiet = disable_dropout(task) if job.calm else []
    settled, again = fix_stream_samples(task, settled, job.steps)
    if job.kind == "look":
        found = {"quiet": quiet, "stream": again is not None, **probe_task(task, settled, world)}
        return found | {"again": found["again"] and again is not False}
    build = replay.replay_builder(job.ranks, job.order, apart=job.apart) if job.kind == "replay" else None
    with Ledger(ledger_path(folder, world.rank)) as ledger:
        trackers = TrackerWriter((), folder, world.rank)
        live = build_run(settled, backend, task, world, ledger=ledger, heart=heart, trackers=trackers, build=build)
        book = RunRecorder(job.trace_at)
        for name, part in live.parts.items():
            part.engine = book.record_engine("" if len(live.parts) == 1 else f"{name}.", part.engine)
        book.record_initial_state()
        if job.kind == "replay":
            live.use_feed(_feed_of_all_ranks(task, settled.config, job.ranks))
        _train_steps(task, live, job.steps)
        heart.set_phase("start")  # what follows has no steps
        made = {
            "steps": book.steps,
            "states": book.states,
            "traced": book.traced,
            "shares": _gradient_shares(book),
            "groups": [
                {**group, "prefix": prefix, "names": [prefix + name for name in group["names"]]}
                for prefix, engine in book.engines.items()
                if isinstance(engine, replay.ReplayEngine)
                for group in engine.groups()
            ],
            "pieces": [
                (p.name, p.kind, p.shape, p.where, p.tensor.detach().flatten().cpu().clone()) for p in book.pieces()
            ],
        }
        for engine in book.engines.values():
            engine.close()
    return made


def _gradient_shares(book: RunRecorder) -> list[dict[str, Any]]:
    """Of a replay, what each step was added up from."""
    kept = {
        prefix: iter(e.shares) for prefix, e in book.engines.items() if isinstance(e, replay.ReplayEngine) and e.shares
    }
    if not kept:
        return []
    rows = [(step["prefix"], next(kept[step["prefix"]])) for step in book.steps]
    return [
        {**row, "parts": {k: {prefix + n: s for n, s in grads.items()} for k, grads in row["parts"].items()}}
        for prefix, row in rows
    ]


def _feed_of_all_ranks(task: Task, config: Config, ranks: int) -> MicrobatchFeed:
    """The microbatches of all ranks, in the order in which a replay takes them."""
    sizes = config.batch.settle(ranks)
    source = data_source_of(task.data(), task.collate if task.defines("collate") else None, task.collate, config, sizes)
    return MicrobatchFeed(source, sizes, None, config.train.seed)


def _train_steps(task: Task, live: TrainingRun, steps: int) -> None:
    """The task's own loop, left after so many steps."""

    def enough(done: int) -> None:
        if done >= steps:
            raise StepsDone

    live.at_boundary(enough)
    with contextlib.suppress(StepsDone):
        task.train(live)
    live.finish()
