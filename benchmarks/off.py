"""Cost of a memory recording for the steps after it: processes with the meter and without take turns."""

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
from unipar.memory.recording.watcher import MemoryRecorder
from unipar.memory.sources.malloc_meter import MallocMeter
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run
from unipar.utils.malloc_settings import keep_freed_memory

STRATEGY = "native/nothing"


def time_steps_in_turns(place: Place, run: Path, control: socket.socket | None) -> None:
    """Train when it is this worker's turn, and send the CPU time of a step; entry function of the worker."""
    assert control is not None
    config = config_of(STRATEGY, 1)
    task: Task = TaskRef.of(None, config.task, {}).load()
    backend = registry.find_backend(config.backend)
    recorder = MemoryRecorder.of_backend(backend, [MallocMeter()]) if MallocMeter.here() else None
    with open_run(settle(config, 1), backend, task, place, run, met=recorder and recorder.begin) as live:
        local_batch = next(live.batches())

        def step() -> None:
            before = live.done
            live.step(local_batch)
            live.seek(before)

        if recorder is not None:
            recorder.follow(part.engine for part in live.parts.values())
        passes = sorted(PASSES_BY_IMPORTANCE, key=PASSES_IN_ORDER.index)
        for i, how in enumerate(passes, 1):  # the same number of steps with and without the meter
            if recorder is not None:
                recorder.before(how)
            step()
            if recorder is not None:
                recorder.between(last=i == len(passes))
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
