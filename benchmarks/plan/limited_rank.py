"""Ranks that train some steps within a limit on what they allocate."""

from __future__ import annotations

import json
import socket
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from unipar.backend import registry
from unipar.config.settled import read_settled
from unipar.distributed.place import Place
from unipar.launcher.processes.worker import exit_on_error
from unipar.task.reference import TaskRef

if TYPE_CHECKING:
    from unipar.distributed.world import World
    from unipar.run_folder.heartbeat import HeartbeatWriter

ENTRY_MODULE = __name__
ENTRY = f"{ENTRY_MODULE}:train_within_limit"
STEPS = 4
"""Steps of a trial: DeepSpeed's third is the first that knows the order of modules."""


def train_within_limit(place: Place, run: Path, control: socket.socket | None) -> None:
    """Train the first steps of a run within the limit that launch.json names; a worker's entry."""
    from unipar.memory.recording.watcher import run_toy_step
    from unipar.memory.sources.malloc_limit import limit_allocations, uncounted_allocations
    from unipar.training.setup import open_run

    settled = read_settled(run)
    launch = json.loads((run / "launch.json").read_text("utf-8"))
    task = TaskRef.from_json(launch["task"]).load()
    backend = registry.find_backend(settled.strategy.backend)

    def met(world: World, heartbeat: HeartbeatWriter) -> None:
        package = import_module(type(backend).__module__)
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)  # what they import is not the model's memory
        run_toy_step(world)
        limit_allocations(launch["limit"], launch["counted"])

    with open_run(settled, backend, task, place, run, met=met) as live, exit_on_error(run, place.rank, live):
        with uncounted_allocations():
            live.loader  # noqa: B018 - made here, because the data's memory is not the model's

        def end(done: int) -> None:
            if done == STEPS:
                live.world.barrier()  # no rank ends before all have done the steps
                raise SystemExit(0)

        live.at_boundary(end)
        task.train(live)
