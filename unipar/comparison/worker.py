"""The ranks of one cell in a comparison: they train when it is their turn, and wait blocked in between."""

from __future__ import annotations

import json
import socket
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from unipar.backend import registry
from unipar.backend.joining import device_of
from unipar.comparison.cell_world import results_of
from unipar.comparison.witness import Witness
from unipar.config.settled import read_settled
from unipar.distributed.place import Place
from unipar.errors import Stopped, TaskError
from unipar.launcher.processes.group import MESSAGE
from unipar.launcher.processes.worker import last_words
from unipar.memory.account import Pass, Resident
from unipar.memory.recording.resident import keep, resident
from unipar.memory.recording.watcher import Watching, sources
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.run import TrainingRun
from unipar.training.setup import opened
from unipar.utils.procfs import forget_peak


def turns(place: Place, run: Path, control: socket.socket | None) -> None:
    """A worker's entry: the task's own loop, held at step boundaries until the parent says go."""
    assert control is not None
    settled = read_settled(run)
    told = json.loads((run / "launch.json").read_text("utf-8"))
    task = TaskRef.from_json(told["task"]).load()
    backend = registry.find(settled.cell.backend)
    watching = Watching(backend, sources(device_of(settled.config, place))) if told["watch"] else None
    if watching is not None:
        import_module(f"{type(backend).__module__}.engine")  # what it imports is not the model's
    met = watching and watching.begin
    with opened(settled, backend, task, place, run, met=met) as live, last_words(run, place.rank, live):
        if watching is not None:
            watching.follow(part.engine for part in live.parts.values())
        with watching.reading() if watching is not None else nullcontext():  # it is no part of what trains
            if watching is not None and type(task).train is Task.train:
                live.feed  # noqa: B018 - made here, it is told from what trains
            witness = Witness(live)
        live.record(live.steps)
        live.gate(_Turn(live, control, watching, witness, run))
        try:
            task.train(live)
        except Exception as e:
            _till(watching, run, e)
            raise
        if live.done < live.steps:
            raise TaskError(f"train(run) ended after {live.done} of {live.steps} steps")
        results_of(run, place.rank).write_text(json.dumps(live.recorded()), encoding="utf-8")


def _till(watching: Watching | None, folder: Path, error: Exception) -> None:
    """Write down what was watched before an error, where that was not done yet."""
    if watching is None or watching.ended or isinstance(error, Stopped):
        return
    try:
        watching.cut(error)
        lost = watching.written(folder)
    except OSError as e:
        lost = str(e)
    if lost:  # there may be no memory left for it; the error itself matters more
        error.add_note(f"what was seen of its memory could not be written down: {lost}")


class _Turn:
    """Called at every step boundary: times the step behind it, and waits when the turn is over."""

    def __init__(
        self, run: TrainingRun, control: socket.socket, watching: Watching | None, witness: Witness, folder: Path
    ) -> None:
        self._run, self._control, self._watching, self._witness, self._folder = run, control, watching, witness, folder
        self._left = 0
        self._passes: list[Pass] = []
        self._resides: Resident | None = None
        self._passing = False
        """Whether the step behind was a pass."""

        self._seconds: list[float] = []
        self._began: float | None = None

    def __call__(self, done: int) -> None:
        if self._began is not None:
            self._settle()
            self._seconds.append(time.perf_counter() - self._began)
            self._left -= 1
        if self._passing and self._watching is not None:
            self._watching.between(last=not self._passes)
            if self._resides is None and "plain" not in self._passes:
                self._resides = resident(self._watching.resident)
                keep()  # whatever became of the watching: steps are timed next
        if self._left == 0:
            self._wait()
        self._passing = bool(self._passes)
        if self._passing and self._watching is not None:
            forget_peak()
            self._watching.before(self._passes.pop(0))
        self._began = time.perf_counter()

    def _settle(self) -> None:
        """A step is over when the device has done it."""
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)

    def _wait(self) -> None:
        self._run.wait()
        if self._began is not None:
            self._witness.rest()
            self._witness.write(self._folder)
        self._answer()
        while (told := self._told()).get("account"):
            assert self._watching is not None
            self._answer(lost=self._watching.written(self._folder, self._resides))
        self._left = told.get("go", 0)
        self._passes = told.get("watch", [])

    def _answer(self, *, lost: str = "") -> None:
        self._control.sendall(json.dumps({"seconds": self._seconds, "lost": lost}).encode())
        self._seconds = []

    def _told(self) -> dict[str, Any]:
        message = self._control.recv(MESSAGE)
        if not message:
            raise Stopped("the comparison has ended")
        return json.loads(message)
