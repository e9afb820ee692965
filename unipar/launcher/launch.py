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

    Args:
        config: Path of a config, a mapping, or a `Config`.
        task: The `Task` class, if the config has no `task.use`.
        model: Function in place of `Task.model`, for a script without a class.
        loss: Function in place of `Task.loss`.
        data: Function in place of `Task.data`.
        weight: Function in place of `Task.weight`.
        collate: Function in place of `Task.collate`.
        validation: Function in place of `Task.validation`.
        metrics: Function in place of `Task.metrics`.
        groups: Function in place of `Task.groups`.
        length: Function in place of `Task.length`.
        overrides: Values by dotted key that replace those of the config.
        overwrite: Replace the contents of the run folder.
        quiet: Print no progress.
        debug_rank: Rank in which `breakpoint()` takes the terminal; a single rank does not need it.

    Returns:
        The report of the run, with losses, norms, evaluations and the run folder.

    Raises:
        ConfigError: The config is invalid.
        TaskError: The task is missing or incomplete.
        OutExists: The run folder is in use.
        Unsupported: The strategy cannot run this config.
        WorkerFailed: A rank failed.

    Examples:
        >>> report = unipar.launch("train.yaml", overrides={"train.steps": 4}, quiet=True)
        >>> report.steps, report.size
        (4, 2)
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
    """Context manager: a run whose loop is the body; this process is one of its ranks, or starts them and exits.

    Args:
        config: Path of a config, a mapping, or a `Config`.
        task: The `Task` class; a script without one passes `model` and `loss`.
        model: Function in place of `Task.model`, for a script without a class.
        loss: Function in place of `Task.loss`.
        data: Function in place of `Task.data`.
        weight: Function in place of `Task.weight`.
        collate: Function in place of `Task.collate`.
        validation: Function in place of `Task.validation`.
        metrics: Function in place of `Task.metrics`.
        groups: Function in place of `Task.groups`.
        length: Function in place of `Task.length`.
        overrides: Values by dotted key that replace those of the config.
        overwrite: Replace the contents of the run folder.
        quiet: Print no progress.
        debug_rank: Rank in which `breakpoint()` takes the terminal; a single rank does not need it.

    Yields:
        The run of this rank.

    Raises:
        ConfigError: The config is invalid.
        TaskError: The task is missing or incomplete.
        Unsupported: The strategy cannot run this config.

    Examples:
        ```python
        import unipar
        from train import Line

        with unipar.join("train.yaml", task=Line, quiet=True) as run:
            for batch in run.batches():
                run.step(batch)
        ```
    """
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
