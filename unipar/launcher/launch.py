"""From a config to a finished run: check, start the ranks, watch them, read what came of it; or join a world."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.config.settled import read_settled
from unipar.config.source import Given
from unipar.errors import TaskError, UniparError, WorkerFailed, rebuild
from unipar.launcher import rerun, worker_entries
from unipar.launcher.prepare import Plan, prepare, task_here
from unipar.launcher.processes import worker
from unipar.launcher.processes.group import Crew
from unipar.launcher.progress import Progress
from unipar.memory.sources.malloc_build import logging
from unipar.results.run import Report
from unipar.task import Task
from unipar.task.importing import importing, pass_launch

if TYPE_CHECKING:
    from unipar.task import Run

Function = Callable[..., Any]

_earlier: list[str] = []
"""What came of each launch of this process: its run folder, or `!Kind: sentence`."""


def launch(
    config: Given,
    *,
    task: type[Task] | None = None,
    model: Function | None = None,
    loss: Function | None = None,
    data: Function | None = None,
    weight: Function | None = None,
    collate: Function | None = None,
    validation: Function | None = None,
    metrics: Function | None = None,
    groups: Function | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Report:
    """Train what `config` says and read what came of it; under a foreign launcher, as one of its ranks."""
    if importing():
        return _came_of(pass_launch())
    if worker_entries.context is not None:
        return _before_join()
    functions = _given(locals())
    try:
        plan = Plan.of(prepare(config, task, overrides, functions=functions), overwrite=overwrite)
        _earlier[:] = _but(plan.out)
        plan = plan.after(_earlier)
        if plan.place is not None:
            _train_here(plan, task_here(task, functions, plan.config, plan.ref), quiet)
        else:
            _start(plan, "unipar.launcher.worker_entries:train", quiet)
        report = Report.read(plan.out)
    except UniparError as e:
        _earlier.append(f"!{type(e).__name__}: {e}")
        raise
    _earlier.append(str(plan.out.resolve()))
    return report


@contextmanager
def join(
    config: Given,
    *,
    task: type[Task] | None = None,
    model: Function | None = None,
    loss: Function | None = None,
    data: Function | None = None,
    weight: Function | None = None,
    collate: Function | None = None,
    validation: Function | None = None,
    metrics: Function | None = None,
    groups: Function | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Generator[Run]:
    """A run whose loop is the body of the `with`: this process is one of its ranks, or starts them and ends."""
    from unipar.launcher.in_process import trained

    functions = _given(locals())
    if importing():
        pass_launch()
        raise TaskError("a file that workers import calls join(); put it under if __name__ == '__main__'")
    if task is None and not {"model", "loss"} <= functions.keys():
        raise TaskError("join needs model= and loss=, or a task=")
    if worker_entries.context is not None:
        with _joined(worker_entries.context, task, functions) as run:
            yield run
        return
    plan = Plan.of(prepare(config, task, overrides, code="in the script"), overwrite=overwrite)
    if plan.place is None and plan.size > 1:
        _start_again(plan, quiet)
    with trained(plan, task_here(task, functions, plan.config, None), quiet=quiet) as run:
        yield run


def _given(named: Mapping[str, Any]) -> dict[str, Function]:
    from unipar.task.task import FUNCTIONS

    return {name: named[name] for name in FUNCTIONS if named[name] is not None}


def _start(plan: Plan, entry: str, quiet: bool, script: Sequence[str] = ()) -> None:
    """Ranks of our own, until all have ended."""
    config, run = plan.config, plan.out.resolve()
    with (
        plan.made(script),
        plan.backend.host(config, plan.size) as environment,
        Progress(run, config.train.steps, quiet=quiet) as shown,
        Crew.of(
            plan.settled,
            plan.backend,
            run,
            entry,
            {**environment, **logging(config)},
            parcel=plan.ref.parcel if plan.ref is not None else b"",
        ) as crew,
    ):
        crew.wait(shown.tick, shown.every)


def _train_here(plan: Plan, task: Task, quiet: bool) -> None:
    from unipar.launcher.in_process import trained

    with trained(plan, task, quiet=quiet) as run:
        task.train(run)


def _start_again(plan: Plan, quiet: bool) -> None:
    """The same script in each rank; what comes after `join` is theirs alone, so this process ends here."""
    script = rerun.typed()
    try:
        _start(plan, "unipar.launcher.worker_entries:script", quiet, script)
    except UniparError as e:
        if isinstance(e, WorkerFailed) and e.traceback:
            sys.stderr.write(e.traceback)
        sys.stderr.write(f"unipar: {e}\n")
        raise SystemExit(e.code) from None
    raise SystemExit(0)


@contextmanager
def _joined(
    context: worker_entries.Context, task: type[Task] | None, functions: Mapping[str, Function]
) -> Generator[Run]:
    """In a worker that runs the user's script."""
    from unipar.backend import registry
    from unipar.training.setup import opened

    if context.joined:
        raise TaskError("join() was called a second time in one script; a script joins one run")
    context.joined = True
    settled = read_settled(context.run)
    backend = registry.find(settled.cell.backend)
    made = task_here(task, functions, settled.config, None)
    folder, rank = context.run, context.place.rank
    with opened(settled, backend, made, context.place, folder) as run, worker.last_words(folder, rank, run):
        yield run


def _before_join() -> Report:
    raise TaskError("launch() and join() are both called in one script; a script that joins does nothing else")


def _but(out: Path) -> list[str]:
    """What workers find of earlier launches when this one has written over `out`."""
    gone = f"!TaskError: the run in {out} was overwritten by a later one; put launches under if __name__ == '__main__'"
    return [gone if entry == str(out.resolve()) else entry for entry in _earlier]


def _came_of(entry: str) -> Report:
    """An earlier launch of the same script, as its caller saw it."""
    if not entry.startswith("!"):
        return Report.read(Path(entry))
    kind, _, sentence = entry[1:].partition(": ")
    raise rebuild(kind, sentence) or WorkerFailed(sentence)
