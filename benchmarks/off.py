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
from unipar.launcher.processes.group import CONTROL_MESSAGE_BYTES
from unipar.memory.account import PASSES_BY_IMPORTANCE, PASSES_IN_ORDER
from unipar.memory.recording.resident import keep_freed_memory
from unipar.memory.recording.watcher import MemoryRecorder
from unipar.memory.sources.malloc import MallocMeter
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run

CELL = "native/nothing"


def time_steps_in_turns(place: Place, run: Path, control: socket.socket | None) -> None:
    """A worker's entry: it trains when it is its turn, and says how much CPU time each step took."""
    assert control is not None
    config = config_of(CELL, 1)
    task: Task = TaskRef.of(None, config.task, {}).load()
    backend = registry.find_backend(config.backend)
    watching = MemoryRecorder(backend, [MallocMeter()]) if MallocMeter.here() else None
    with open_run(settle(config, 1), backend, task, place, run, met=watching and watching.begin) as live:
        share = next(live.batches())

        def step() -> None:
            before = live.done
            live.step(share)
            live.seek(before)

        if watching is not None:
            watching.follow(part.engine for part in live.parts.values())
        passes = sorted(PASSES_BY_IMPORTANCE, key=PASSES_IN_ORDER.index)
        for i, how in enumerate(passes, 1):  # as many steps in all
            if watching is not None:
                watching.before(how)
            step()
            if watching is not None:
                watching.between(last=i == len(passes))
        if "MALLOC_MMAP_THRESHOLD_" in os.environ:
            keep_freed_memory()  # as a comparison does before it times
        for _ in range(WARM):
            step()
        control.sendall(b"ready")
        while steps := control.recv(CONTROL_MESSAGE_BYTES):
            began = time.process_time()
            for _ in range(int(steps)):
                step()
            control.sendall(str((time.process_time() - began) / int(steps)).encode())
