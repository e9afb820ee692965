"""Worker entry of `verify`: run the jobs of a world one after another, and write each result into its folder."""

from __future__ import annotations

import contextlib
import json
import socket
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unipar.backend import Backend, registry
from unipar.backend.precision import parameter_dtype
from unipar.checkpoint.saved_state import SavedState
from unipar.config import Config
from unipar.config.sections.checkpoint import Checkpoint
from unipar.config.settled import SettledConfig
from unipar.data.dataset import data_source_of
from unipar.data.lengths import measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.errors import TaskError, UniparError, Unsupported
from unipar.model.create import narrow_frozen_parameters
from unipar.model.fp8_linears import fp8_linears_of
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.tracking.writer import TrackerWriter
from unipar.training.resuming import choose_checkpoint, restore_run
from unipar.training.saves import RunCheckpoints
from unipar.training.setup import build_run
from unipar.training.training_run import TrainingRun
from unipar.utils.address import Location, parse_location
from unipar.utils.files import whole
from unipar.verification.worker import determinism, replay, split_sums
from unipar.verification.worker.best_choices import BestChoices
from unipar.verification.worker.fixed_stream import fix_stream_samples
from unipar.verification.worker.jobs import JOBS_FILE_NAME, Job, job_result_path
from unipar.verification.worker.preparation import prepare_once
from unipar.verification.worker.recorded import read_recorded, write_recorded
from unipar.verification.worker.run_recorder import RunRecorder
from unipar.verification.worker.task_probe import disable_dropout, error_in_one_line, probe_task


class StepsDone(BaseException):
    """Control exception: the task's loop has done the number of steps that the job asks for."""


def run_world_jobs(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Run all jobs of this world on this rank."""
    warnings.filterwarnings("ignore")  # every job trains the same task and would repeat them
    content = json.loads((folder / JOBS_FILE_NAME).read_text("utf-8"))
    ref = TaskRef.from_json(content["task"])
    jobs = [Job.from_json(job) for job in content["jobs"]]
    first = jobs[0].settled
    backend = registry.find_backend(first.strategy.backend)
    world = backend.join(first.on_device, place)
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for i, job in enumerate(jobs):
        result = _run_job_or_error(job, backend, ref, world, folder, heartbeat, strict=content["strict"])
        with whole(job_result_path(folder, i, place.rank)) as path:
            write_recorded(result, path)
        world.barrier()
    world.close()


def _run_job_or_error(
    job: Job,
    backend: Backend,
    ref: TaskRef,
    world: World,
    folder: Path,
    heartbeat: HeartbeatWriter,
    *,
    strict: bool | None,
) -> dict[str, Any]:
    """Return the result of a job, or a UniparError, which every rank raises alike.

    Any other error ends the world, except in a job that may fail: it then is the result.
    """
    try:
        if job.kind != "kernels":
            return _run_job(job, backend, ref, world, folder, heartbeat, strict=strict)
        with determinism.unrepeatable_operations() as names:
            result = _run_job(job, backend, ref, world, folder, heartbeat, strict=False)
        return {"unrepeatable": names, "tf32": result["tf32"]}
    except UniparError as e:
        return {"error": str(e), "kind": type(e).__name__}
    except Exception as e:
        if not job.may_fail:
            raise
        return {"unable": error_in_one_line(e)}


def _run_job(
    job: Job,
    backend: Backend,
    ref: TaskRef,
    world: World,
    folder: Path,
    heartbeat: HeartbeatWriter,
    *,
    strict: bool | None,
) -> dict[str, Any]:
    """Return what a job has recorded; `strict`: whether an operation that no run repeats is an error, None: CPU."""
    settled = job.settled
    task = ref.load()
    had_tf32 = strict is not None and determinism.set_numbers(strict=strict)
    prepare_once(task, folder.parent)
    dropout_names = [] if job.key.dropout else disable_dropout(task)
    settled, again = fix_stream_samples(task, settled, job.steps)
    if job.kind == "probe":
        facts = {"quiet": dropout_names, "stream": again is not None, **probe_task(task, settled, world)}
        return facts | {"again": facts["again"] and again is not False}
    build, unequal, dtype = None, list[str](), parameter_dtype(settled.config.train.precision)
    if job.kind == "replay":
        build = replay.replay_builder(
            job.shares, job.order, per_microbatch=job.per_microbatch, perturbed=job.key.perturbed
        )
    with RunLog(run_log_path(folder, world.rank)) as run_log:
        trackers = TrackerWriter((), folder, world.rank)
        try:
            live = build_run(
                settled,
                backend,
                task,
                world,
                run_log=run_log,
                heartbeat=heartbeat,
                trackers=trackers,
                build=build,
                prepared=True,
                counts=False,
            )
        except TaskError as e:
            if job.key.kind != "strategy":
                raise
            raise Unsupported(job.key.strategy, [str(e)]) from e  # one process can train this task
        if strict is not None:  # the task's model() may have set them
            had_tf32 |= determinism.set_numbers(strict=strict)
        choices = BestChoices(read_recorded(Path(job.follows)) if job.follows else None)
        recorder = RunRecorder(
            job.trace_at,
            partial(split_sums.sums_in_parts, job.key.tensor, job.key.context),
            shared=settled.strategy.axes.split,
            masks=job.key.dropout,
            held=job.kind == "run" and _holds_copies(settled),
            slots=job.kind == "replay",
            choices=choices if job.key.choices else None,
        )
        for name, part in live.parts.items():
            part.engine = recorder.record_engine("" if len(live.parts) == 1 else f"{name}.", part.engine)
        if job.resumes:
            unequal = _restore_and_compare(live, parse_location(job.resumes))
        recorder.record_initial_state()
        first_buffers = recorder.buffers(share=False)
        if job.kind == "replay":
            live.use_loader(_loader_of_all_ranks(task, settled.config, job.shares))
        before = plain_numbers(task, live) if job.saves_in else {}
        _train_steps(task, live, job.steps)
        if job.saves_in:
            RunCheckpoints(Checkpoint(), live, folder, {}, into=Path(job.saves_in)).at_end(live.done)
        heartbeat.set_phase("start")  # collecting the result is not part of a step
        fp8, left_fp8 = _observe_fp8(live)
        result = {
            "seat": {**world.mesh.seat, "leads": world.leads},
            "steps": recorder.steps,
            "states": recorder.states,
            "traced": recorder.traced,
            "shares": _gradient_shares(recorder),
            "groups": [
                {
                    "prefix": prefix,
                    "decay": group["decay"],
                    "names": [prefix + name for name in group["names"]],
                    "tied": [prefix + name for name in group["tied"]],
                }
                for prefix, engine in recorder.engines.items()
                if isinstance(engine, replay.ReplayEngine)
                for group in engine.groups()
            ],
            "pieces": [
                (p.name, p.kind, p.shape, tuple(p.where), p.tensor.detach().flatten().cpu().clone())
                for p in recorder.pieces()
            ],
            "copies": recorder.copies,
            "held": recorder.held,
            "counted": _changed_numbers(before, task, live) if job.saves_in else [],
            "unequal": unequal,
            "tf32": had_tf32,
            "first_buffers": first_buffers,
            "buffers": recorder.buffers() if job.kind == "replay" or settled.strategy.axes.split else {},
            "fp8": fp8,
            "left_fp8": left_fp8,
            "choices": choices.steps,
            "moved": choices.moved,
            "narrow": any(narrow_frozen_parameters(part.module, dtype) for part in live.parts.values()),
        }
        for engine in recorder.engines.values():
            engine.close()
    return result


def _observe_fp8(live: TrainingRun) -> tuple[dict[str, str], list[str]]:
    """Return what multiplied in this rank's linear layers in fp8, by name, and a sentence for each that left it."""
    kernels, left = dict[str, str](), list[str]()
    for part in live.parts.values():
        if (fp8 := fp8_linears_of(part.module)) is not None:
            before = "" if len(live.parts) == 1 else f"{part.name}."
            ran, wrong = fp8.observed(part.module)
            kernels |= {before + name: kernel for name, kernel in ran.items()}
            left += [before + sentence for sentence in wrong]
    return kernels, left


def _holds_copies(settled: SettledConfig) -> bool:
    """Return whether several ranks hold the same weights after each step, and train on samples of their own."""
    return settled.ranks > 1 and not settled.strategy.axes.split and settled.config.train.local_steps is None


def _gradient_shares(recorder: RunRecorder) -> list[dict[str, Any]]:
    """Return what a replay added up in each step, with full parameter names; [] if it did not keep that."""
    shares = {
        prefix: iter(e.shares)
        for prefix, e in recorder.engines.items()
        if isinstance(e, replay.ReplayEngine) and e.shares
    }
    if not shares:
        return []
    rows = [(step["prefix"], next(shares[step["prefix"]])) for step in recorder.steps]
    return [
        {
            "parts": {k: {prefix + n: s for n, s in grads.items()} for k, grads in row["parts"].items()},
            "norms": row["norms"],
            "lengths": {prefix + n: length for n, length in row["lengths"].items()},
        }
        for prefix, row in rows
    ]


def _loader_of_all_ranks(task: Task, config: Config, shares: int) -> MicrobatchLoader:
    """Return a loader of the microbatches of all shares, in the order in which a replay takes them."""
    batch = config.batch  # of one process
    sizes = (batch if batch.tokens is None else batch.on_other_ranks(1, shares)).settle(shares)
    source = data_source_of(task.data(), task.collate if task.defines("collate") else None, task.collate, config, sizes)
    lengths = measure_lengths(task, source.dataset, config.train.seed, sizes)
    return MicrobatchLoader(source, sizes, None, config.train.seed, lengths=lengths)


def _train_steps(task: Task, live: TrainingRun, steps: int) -> None:
    """Run the task's own loop, and leave it after `steps` steps."""

    def stop_when_done(done: int) -> None:
        if done >= steps:
            raise StepsDone

    live.at_boundary(stop_when_done)
    with contextlib.suppress(StepsDone):
        task.train(live)
    live.finish()


def _restore_and_compare(live: TrainingRun, path: Location) -> list[str]:
    """Give the run the state of a checkpoint; return the tensors on this rank that are not those of the checkpoint."""
    chosen = choose_checkpoint(str(path), path.parent, live.world, live.config, ())
    assert chosen is not None
    restore_run(live, chosen)
    with SavedState(path, chosen.checkpoint.manifest) as saved:
        return [
            f"{piece.name} ({piece.kind})"
            for piece in live.pieces()
            if not torch.equal(piece.tensor.detach().cpu().flatten(), saved(piece.name, piece.kind, piece.where))
        ]


def _changed_numbers(before: dict[str, float], task: Task, live: TrainingRun) -> list[str]:
    return sorted(key for key, value in plain_numbers(task, live).items() if value != before.get(key, value))


def plain_numbers(task: Task, live: TrainingRun) -> dict[str, float]:
    """Return the numbers that modules, the task and the dataset keep as attributes: a checkpoint has tensors alone."""
    owners: dict[str, Any] = {"the task": task, "the dataset": live.loader.source.dataset}
    for part in live.parts.values():
        owners |= {name or "the model": module for name, module in part.module.named_modules()}
    return {
        f"{name} in {called}": value
        for called, owner in owners.items()
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("_")
    }
