"""`launch` and `join`: first begin to import torch, in the process that ranks are forked from, then read the config."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unipar.launcher.processes import early

if TYPE_CHECKING:
    from unipar.config.config_source import Given
    from unipar.launcher.launched_run import TaskFunction
    from unipar.results.run_report import Report
    from unipar.task import Run, Task


def launch(
    config: Given,
    *,
    task: type[Task] | None = None,
    model: TaskFunction | None = None,
    loss: TaskFunction | None = None,
    data: TaskFunction | None = None,
    weight: TaskFunction | None = None,
    collate: TaskFunction | None = None,
    validation: TaskFunction | None = None,
    metrics: TaskFunction | None = None,
    groups: TaskFunction | None = None,
    length: TaskFunction | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    debug_rank: int | None = None,
) -> Report:
    """Train what `config` says and return its report; under a foreign launcher, train as one of its ranks.

    `debug_rank`: rank in which `breakpoint()` takes the terminal; a single rank needs no such word.
    """
    functions = _select_functions(locals())
    early.begin_imports()
    try:
        from unipar.launcher.launched_run import run_launch

        return run_launch(config, task, functions, overrides, overwrite=overwrite, quiet=quiet, debug_rank=debug_rank)
    finally:
        early.end_imports()


@contextmanager
def join(
    config: Given,
    *,
    task: type[Task] | None = None,
    model: TaskFunction | None = None,
    loss: TaskFunction | None = None,
    data: TaskFunction | None = None,
    weight: TaskFunction | None = None,
    collate: TaskFunction | None = None,
    validation: TaskFunction | None = None,
    metrics: TaskFunction | None = None,
    groups: TaskFunction | None = None,
    length: TaskFunction | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    debug_rank: int | None = None,
) -> Generator[Run]:
    """Context manager: a run whose loop is the body; this process is one of its ranks, or starts them and exits."""
    functions = _select_functions(locals())
    early.begin_imports()
    try:
        from unipar.launcher.launched_run import run_join

        with run_join(
            config, task, functions, overrides, overwrite=overwrite, quiet=quiet, debug_rank=debug_rank
        ) as run:
            yield run
    finally:
        early.end_imports()


def _select_functions(named: Mapping[str, Any]) -> dict[str, TaskFunction]:
    """Return the functions of a task among the arguments."""
    from unipar.task.task import TASK_FUNCTIONS

    return {name: named[name] for name in TASK_FUNCTIONS if named[name] is not None}
