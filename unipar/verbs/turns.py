"""The ranks of one cell in a comparison: they train when it is their turn, and wait blocked in between."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import torch

from unipar.config import Config
from unipar.errors import Stopped, TaskError
from unipar.loop import Run
from unipar.opening import opened
from unipar.place import Place
from unipar.task import TaskRef
from unipar.verbs.contestant import MESSAGE, results_of
from unipar.worker import last_words


def turns(place: Place, run: Path, control: socket.socket | None) -> None:
    """A worker's entry: the task's own loop, held at step boundaries until the parent says go."""
    assert control is not None
    config = Config.model_validate_json((run / "config.json").read_text("utf-8"))
    task = TaskRef.from_json(json.loads((run / "launch.json").read_text("utf-8"))["task"]).load()
    with opened(config, task, place, run) as live, last_words(run, place.rank):
        live.record(live.steps)
        live.gate(_Turn(live, control))
        task.train(live)
        if live.done < live.steps:
            raise TaskError(f"train(run) ended after {live.done} of {live.steps} steps")
        results_of(run, place.rank).write_text(json.dumps(live.recorded()), encoding="utf-8")


class _Turn:
    """Called at every step boundary: times the step behind it, and waits when the turn is over."""

    def __init__(self, run: Run, control: socket.socket) -> None:
        self._run, self._control = run, control
        self._left = 0
        self._seconds: list[float] = []
        self._began: float | None = None

    def __call__(self, done: int) -> None:
        if self._began is not None:
            self._settle()
            self._seconds.append(time.perf_counter() - self._began)
            self._left -= 1
        if self._left == 0:
            self._wait()
        self._began = time.perf_counter()

    def _settle(self) -> None:
        """A step is over when the device has done it."""
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)

    def _wait(self) -> None:
        self._run.wait()
        self._control.sendall(json.dumps({"seconds": self._seconds}).encode())
        self._seconds = []
        message = self._control.recv(MESSAGE)
        if not message:
            raise Stopped("the comparison has ended")
        told: dict[str, Any] = json.loads(message)
        self._left = told.get("go", 0)
