"""What memory that was watched costs the steps after it: processes with the meter and without, taking turns."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from benchmarks.gpt import WARM, config_of
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.distributed.place import Place
from unipar.launcher.processes.group import MESSAGE
from unipar.memory.account import ORDER, PASSES
from unipar.memory.recording.resident import keep
from unipar.memory.recording.watcher import Watching
from unipar.memory.sources.malloc import Meter
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import opened

CELL = "native/nothing"


def turns(place: Place, run: Path, control: socket.socket | None) -> None:
    """A worker's entry: it trains when it is its turn, and says how much CPU time each step took."""
    assert control is not None
    config = config_of(CELL, 1)
    task: Task = TaskRef.of(None, config.task, {}).load()
    backend = registry.find(config.backend)
    watching = Watching(backend, [Meter()]) if Meter.here() else None
    with opened(settle(config, 1), backend, task, place, run, met=watching and watching.begin) as live:
        share = next(live.batches())

        def step() -> None:
            before = live.done
            live.step(share)
            live.seek(before)

        if watching is not None:
            watching.follow(part.engine for part in live.parts.values())
        passes = sorted(PASSES, key=ORDER.index)
        for i, how in enumerate(passes, 1):  # as many steps in all
            if watching is not None:
                watching.before(how)
            step()
            if watching is not None:
                watching.between(last=i == len(passes))
        if "MALLOC_MMAP_THRESHOLD_" in os.environ:
            keep()  # as a comparison does before it times
        for _ in range(WARM):
            step()
        control.sendall(b"ready")
        while steps := control.recv(MESSAGE):
            began = time.process_time()
            for _ in range(int(steps)):
                step()
            control.sendall(str((time.process_time() - began) / int(steps)).encode())
