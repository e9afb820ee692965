"""Workers of one strategy in a comparison: they train when it is their turn, and wait blocked in between."""

from __future__ import annotations

import json
import socket
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from unipar.backend import registry
from unipar.backend.joining import device_of_rank
from unipar.comparison.strategy_world import rank_results_path
from unipar.comparison.witness import MarksRecorder
from unipar.config.settled import read_settled
from unipar.distributed.device import synchronize
from unipar.distributed.place import Place
from unipar.errors import Stopped, TaskError
from unipar.launcher.processes.group import CONTROL_MESSAGE_BYTES
from unipar.launcher.processes.recompute import plan_recompute
from unipar.launcher.processes.worker import exit_on_error
from unipar.memory.account import RecordingPass, ResidentMemory
from unipar.memory.recording.resident import measure_resident
from unipar.memory.recording.watcher import MemoryRecorder, choose_event_sources
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run
from unipar.training.training_run import TrainingRun
from unipar.utils.malloc_settings import keep_freed_memory
from unipar.utils.procfs import reset_resident_peak


def train_in_turns(place: Place, run: Path, control: socket.socket | None) -> None:
    """Run the task's own loop, which waits at step boundaries until the parent says go; a worker's entry."""
    assert control is not None
    settled = read_settled(run)
    launch = json.loads((run / "launch.json").read_text("utf-8"))
    task = TaskRef.from_json(launch["task"]).load()
    backend = registry.find_backend(settled.strategy.backend)
    watching = (
        MemoryRecorder.of_backend(backend, choose_event_sources(device_of_rank(settled.on_device, place)))
        if launch["watch"]
        else None
    )
    if watching is not None:
        import_module(f"{type(backend).__module__}.engine")  # its imports must not count as the model's memory
    met = watching and watching.begin
    with (
        open_run(settled, backend, task, place, run, met=met, plan_recompute=plan_recompute) as live,
        exit_on_error(run, place.rank, live),
    ):
        if watching is not None:
            watching.follow(part.engine for part in live.parts.values())
        with watching.reading() if watching is not None else nullcontext():  # allocations here are not the training's
            if watching is not None and type(task).train is Task.train:
                live.loader  # noqa: B018 - made here, so that the dataset's memory is not counted as the training's
            witness = MarksRecorder(live)
        live.record(live.steps)
        live.work.keeps_weights, live.work.in_logged_steps = True, False
        turns = _TurnControl(live, control, watching, witness, run)
        live.at_boundary(turns)
        try:
            task.train(live)
        except Exception as e:
            _write_partial_account(watching, run, e)
            raise
        if live.done < live.steps:
            raise TaskError(f"train(run) ended after {live.done} of {live.steps} steps")
        if live.config.log.trace is not None:
            live.note("untraced", seconds=median(turns.timed))
        results = live.recorded_steps() | {"work": live.work.rank_work().model_dump(mode="json")}
        rank_results_path(run, place.rank).write_text(json.dumps(results), encoding="utf-8")


def _write_partial_account(watching: MemoryRecorder | None, folder: Path, error: Exception) -> None:
    """Write the memory that was recorded before an error, unless that is done already."""
    if watching is None or watching.ended or isinstance(error, Stopped):
        return
    try:
        watching.end_after_error(error)
        lost = watching.write_account(folder)
    except OSError as e:
        lost = str(e)
    if lost:  # perhaps no memory is left for it; the error itself matters more
        error.add_note(f"its recorded memory could not be written: {lost}")


class _TurnControl:
    """Callback at every step boundary, which times the last step and waits when the turn is over."""

    def __init__(
        self,
        run: TrainingRun,
        control: socket.socket,
        watching: MemoryRecorder | None,
        witness: MarksRecorder,
        folder: Path,
    ) -> None:
        self._run, self._control, self._watching, self._witness, self._folder = run, control, watching, witness, folder
        self._steps_left = 0
        self._passes: list[RecordingPass] = []
        self._resident_memory: ResidentMemory | None = None
        self._in_memory_pass = False
        """Whether memory was recorded in the last step."""

        self._measures_waits = False
        """Whether waiting is measured in all steps of this turn, because they warm up."""

        self._waits_recorded = False
        """Whether waiting was measured in a step in which memory was recorded: such a step is better than a warm-up."""

        trace = run.config.log.trace
        self._traced = trace.numbers if trace is not None else range(0)
        self._seconds: list[float] = []
        self.timed: list[float] = []
        """Seconds of the timed steps that were not traced, if any is traced."""

        self._began: float | None = None

    def __call__(self, done: int) -> None:
        self._run.work.take_wait(keep=True)
        if self._began is not None:
            synchronize(self._run.device)  # it has finished the step
            self._add_seconds(done, time.perf_counter() - self._began)
            self._steps_left -= 1
        if self._in_memory_pass and self._watching is not None:
            self._run.work.count_compiling(on=True)
            self._watching.between(last=not self._passes)
            if self._resident_memory is None and "plain" not in self._passes:
                self._resident_memory = measure_resident(self._watching.resident)
                keep_freed_memory()  # also after an error of the recording, because the next steps are timed
        if self._steps_left == 0:
            self._wait()
        self._in_memory_pass = bool(self._passes)
        if self._in_memory_pass and self._watching is not None:
            reset_resident_peak()
            how = self._passes.pop(0)
            self._run.work.count_compiling(on=False)
            self._watching.before(how)
            self._measure_waits(how)
        elif self._measures_waits:
            self._begin_measured_step()
        self._began = time.perf_counter()

    def _add_seconds(self, step: int, seconds: float) -> None:
        """Note the seconds of a step, unless it was traced, which takes time."""
        if step in self._traced:
            return
        self._seconds.append(seconds)
        if self._traced and not self._in_memory_pass and not self._measures_waits:
            self.timed.append(seconds)

    def _measure_waits(self, how: RecordingPass) -> None:
        """Measure waiting in a step in which memory is recorded without slowing it; on CUDA the warm-up must do."""
        if how == "plain" and self._run.device.type == "cpu":
            if not self._waits_recorded:
                self._run.work.forget_waits()
            self._waits_recorded = True
            self._begin_measured_step()

    def _begin_measured_step(self) -> None:
        """Let all ranks begin the step together: what one does later, before the step, is no waiting of the others."""
        self._run.world.barrier()
        self._run.work.begin(measure=True)

    def _wait(self) -> None:
        self._run.mark("waiting")
        if self._began is not None:
            self._witness.stop_fingerprinting()
            self._witness.write(self._folder)
        self._answer()
        while (command := self._receive_command()).get("account"):
            assert self._watching is not None
            self._answer(lost=self._watching.write_account(self._folder, self._resident_memory))
        self._steps_left = command.get("go", 0)
        self._passes = command.get("watch", [])
        self._measures_waits = command.get("waits", False)

    def _answer(self, *, lost: str = "") -> None:
        self._control.sendall(json.dumps({"seconds": self._seconds, "lost": lost}).encode())
        self._seconds = []

    def _receive_command(self) -> dict[str, Any]:
        message = self._control.recv(CONTROL_MESSAGE_BYTES)
        if not message:
            raise Stopped("the comparison has ended")
        return json.loads(message)
