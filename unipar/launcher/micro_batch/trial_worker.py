"""Ranks of a trial, which train some steps within a limit on memory; and the process that plans, without memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.distributed.place import Place
from unipar.launcher.processes.recompute import plan_recompute
from unipar.launcher.processes.worker import exit_on_error

if TYPE_CHECKING:
    import torch

    from unipar.backend import Backend
    from unipar.config.settled import SettledConfig
    from unipar.distributed.world import World
    from unipar.run_folder.heartbeat import HeartbeatWriter
    from unipar.task import Task
    from unipar.training.training_run import TrainingRun

TRIAL_ENTRY = f"{__name__}:try_microbatch"
PLAN_ENTRY = f"{__name__}:plan_microbatches"
SCRIPT_ENTRY = "unipar.launcher.worker_entries:rerun_script"

TRIAL_STEPS = 3
"""Steps of a trial: the first makes the optimizer's state, in the second DDP makes new buckets, the third has all."""


def trial_path(run: Path, rank: int) -> Path:
    """Return the path of the file that says how much memory a rank of a trial used."""
    return run / f"rank-{rank}.trial.json"


def plan_path(run: Path) -> Path:
    """Return the path of the file with the predicted peaks."""
    return run / "plan.json"


def plan_microbatches(place: Place, run: Path, control: socket.socket | None) -> None:
    """Predict the peaks of the run's task by strategy and size of the microbatch; a worker's entry."""
    from unipar.run_folder.layout import read_launch_file
    from unipar.task.reference import TaskRef

    predict_microbatches(TaskRef.from_json(read_launch_file(run)["task"]).load(), run)


def predict_microbatches(task: Task, run: Path) -> None:
    """Write the predicted peaks of a task, or why there are none, in the strategies that launch.json names."""
    from unipar.config.settled import SettledConfig
    from unipar.errors import UniparError
    from unipar.run_folder.layout import read_launch_file
    from unipar.training.fake_run.fake_task import FEWEST_SAMPLES
    from unipar.training.fake_run.task_traces import TaskTraces, predict_peaks_by_micro
    from unipar.training.task_facts import prepare_task

    prepare_task(task)
    jobs = read_launch_file(run)["plan"]
    worlds = [SettledConfig.from_json(job["config"], job["settled"]) for job in jobs]
    traces = TaskTraces(worlds[0].config, FEWEST_SAMPLES, task)
    answers: list[dict[str, Any]] = []
    for settled, job in zip(worlds, jobs, strict=True):
        try:
            peaks, refused = predict_peaks_by_micro(settled, traces, job["micros"]), ""
        except UniparError as e:
            peaks, refused = {}, str(e).replace("\n", " ")
        answers.append({"peaks": peaks, "refused": refused})
    plan_path(run).write_text(json.dumps(answers), encoding="utf-8")


def try_microbatch(place: Place, run: Path, control: socket.socket | None) -> None:
    """Train the first steps of a run's task within a limit on memory; a worker's entry."""
    from unipar.backend import registry
    from unipar.config.settled import read_settled
    from unipar.run_folder.layout import read_launch_file
    from unipar.task.reference import TaskRef

    settled = read_settled(run)
    task = TaskRef.from_json(read_launch_file(run)["task"]).load()
    backend = registry.find_backend(settled.strategy.backend)
    with open_trial(settled, backend, task, place, run) as live, exit_on_error(run, place.rank, live):
        task.train(live)


@contextmanager
def open_trial(settled: SettledConfig, backend: Backend, task: Task, place: Place, run: Path) -> Generator[TrainingRun]:
    """Context manager: a run that ends this process, with exit code 0, after the steps of a trial."""
    from unipar.memory.recording.watcher import run_toy_step
    from unipar.memory.sources.malloc_limit import uncounted_allocations
    from unipar.run_folder.layout import read_launch_file
    from unipar.task import Task
    from unipar.training.setup import open_run

    shared_by = place.local_size if ":" in settled.config.device else 1
    limit = _Limit(int(read_launch_file(run)["trial"]["limit"]), shared_by)

    def met(world: World, heartbeat: HeartbeatWriter) -> None:
        import_module(f"{type(backend).__module__}.engine")  # its imports are not the model's memory
        run_toy_step(world)
        limit.begin(world.device)

    with open_run(settled, backend, task, place, run, met=met, plan_recompute=plan_recompute) as live:
        with uncounted_allocations():  # the data's memory is not the model's
            if type(task).train is Task.train:
                live.loader  # noqa: B018 - made here

        def end(done: int) -> None:
            trial_path(run, place.rank).write_text(json.dumps({"steps": done, "peak": limit.look()}), encoding="utf-8")
            if done >= TRIAL_STEPS:
                live.world.barrier()  # no rank ends before all have done the steps
                raise SystemExit(0)

        live.at_boundary(end)
        yield live


@dataclass
class _Limit:
    """Limit on the bytes that this rank may use from a moment on."""

    size: int
    shared_by: int
    """Number of ranks on the device."""

    device: torch.device | None = None
    peak: int = 0
    """Most bytes in use at a time, as far as `look` has seen."""

    def begin(self, device: torch.device) -> None:
        """Enforce the limit from now on."""
        self.device = device
        if device.type == "cpu":
            from unipar.memory.sources.malloc_limit import limit_allocations

            limit_allocations(self.size)
            return
        from unipar.distributed.device import bytes_reserved, forget_peaks, free_and_total_bytes, limit_memory

        free, total = free_and_total_bytes(device)
        besides = (total - free - bytes_reserved(device)) // self.shared_by  # CUDA's context, NCCL
        limit_memory(device, min(1.0, max(0, self.size - besides) / total))
        forget_peaks(device)

    def look(self) -> int:
        """Return the most bytes that were in use at a time."""
        assert self.device is not None
        if self.device.type == "cpu":
            from unipar.memory.sources.malloc_limit import peak_of_allocations

            self.peak = max(self.peak, peak_of_allocations())
        else:
            from unipar.distributed.device import peak_bytes_reserved

            self.peak = peak_bytes_reserved(self.device)
        return self.peak
