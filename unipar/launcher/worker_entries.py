"""Entry functions of workers: train a task, or run the user's script again."""

from __future__ import annotations

import json
import runpy
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from unipar.distributed.place import Place
from unipar.errors import TaskError
from unipar.launcher.processes.recompute import plan_recompute
from unipar.launcher.processes.worker import exit_on_error
from unipar.launcher.worker_stdout import WorkerStdout


@dataclass
class ScriptContext:
    """Place and run folder of this worker, for `join` in a script that workers run again."""

    place: Place
    run: Path
    has_joined: bool = False


script_context: ScriptContext | None = None
"""Context of this worker; None in every process that does not run a script again."""


def train_task(place: Place, run: Path, control: socket.socket | None) -> None:
    """Train the run's task; the entry of `launch`."""
    from unipar.backend import registry
    from unipar.config.settled import read_settled
    from unipar.task.reference import TaskRef
    from unipar.training.setup import open_run

    settled = read_settled(run)
    backend = registry.find_backend(settled.strategy.backend)
    task = TaskRef.from_json(json.loads((run / "launch.json").read_text("utf-8"))["task"]).load()
    if place.rank == 0:
        # after the import of the task: the parent has already printed what the user's file prints at its top level
        sys.stdout = WorkerStdout(sys.stdout, run)
    with (
        open_run(settled, backend, task, place, run, plan_recompute=plan_recompute) as training,
        exit_on_error(run, place.rank, training),
    ):
        training.train()


def rerun_script(place: Place, run: Path, control: socket.socket | None) -> None:
    """Run the user's script again, up to its `join` and past it; the entry of `join`."""
    global script_context
    script_context = ScriptContext(place, run)
    if place.rank == 0:
        sys.stdout = WorkerStdout(sys.stdout, run)
    words: list[str] = json.loads((run / "launch.json").read_text("utf-8"))["script"]
    how, what, *rest = words
    if how == "module":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")
    if not script_context.has_joined:
        raise TaskError(f"{what} ended in this worker without a join(); call it in every process")
