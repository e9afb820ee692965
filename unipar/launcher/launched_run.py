"""A launched run: check its config, start the ranks, watch them, read the report; the same around a user's own loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unipar.backend import registry
from unipar.config.config_source import Given
from unipar.config.settled import read_settled
from unipar.errors import TaskError, UniparError, WorkerFailed, rebuild
from unipar.launcher import rerun, worker_entries
from unipar.launcher.machines.start import CommonStart
from unipar.launcher.micro_batch.choice import usable_memory
from unipar.launcher.preparation.prepare import make_task, prepare
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.launcher.processes import early, worker
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.postmortem import make_stopped_error
from unipar.launcher.processes.signals import SignalReceiver
from unipar.launcher.processes.starters import ENTRY_MODULES, SharedForkServer, may_fork
from unipar.launcher.progress import Progress
from unipar.launcher.restarting import Restarts
from unipar.memory.sources.malloc_build import step_log_environment
from unipar.results.run_report import Report
from unipar.run_folder.error_file import record_run_error
from unipar.run_folder.layout import read_launch_file
from unipar.task import Task
from unipar.task.importing import is_importing_task, next_earlier_run
from unipar.utils.notebook import in_notebook

if TYPE_CHECKING:
    from unipar.task import Run

TaskFunction = Callable[..., Any]
Result = TypeVar("Result")

_earlier_launches: list[str] = []
"""Result of each launch of this process: its run folder, or `!Kind: sentence` for an error."""


def run_launch(
    config: Given,
    task: type[Task] | None,
    functions: Mapping[str, TaskFunction],
    overrides: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    quiet: bool,
    debug_rank: int | None = None,
) -> Report:
    """Train what `config` says, in workers or as a rank of a foreign launcher's world, and return the report."""
    if is_importing_task():
        return _result_of_earlier(next_earlier_run(), task, functions)
    if worker_entries.script_context is not None:
        raise TaskError("launch() and join() are both called in one script; call one of them")
    try:
        start = CommonStart()
        with start.sharing_errors():
            prepared = prepare(config, task, overrides, functions=functions)
            prepared.show_notes(quiet=quiet)
            plan = PreparedRun.of(prepared, overwrite=overwrite, restarts=start.meet(prepared.source.config))
        plan = start.agree(plan).for_debugging(debug_rank)
        _earlier_launches[:] = _launches_without(plan.out)
        plan = plan.after(_earlier_launches)
        if plan.finished:
            out = _show_finished(plan, quiet)
        elif plan.place is not None:
            early.end_imports()
            out = _train_in_process(plan, make_task(task, functions, plan.config, plan.ref), quiet)
        else:
            out = _start_workers(find_micro(plan, quiet), "unipar.launcher.worker_entries:train_task", quiet)
        report = _read_report(out, task, functions)
    except UniparError as e:
        _earlier_launches.append(f"!{type(e).__name__}: {e}")
        raise
    _earlier_launches.append(str(out.resolve()))
    if in_notebook():
        _write_page(out)
    return report


def _write_page(out: Path) -> None:
    """Write the run's page, which a notebook shows for its report; that there is none is said, and no error."""
    from unipar.report.build import try_write_page, write_run_page

    line = try_write_page(lambda: write_run_page(out))
    if line.startswith("no page"):
        sys.stderr.write(f"{line}\n")


@contextmanager
def run_join(
    config: Given,
    task: type[Task] | None,
    functions: Mapping[str, TaskFunction],
    overrides: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    quiet: bool,
    debug_rank: int | None = None,
) -> Generator[Run]:
    """Context manager: a run whose loop is the body; this process is one of its ranks, or starts them and exits."""
    from unipar.launcher.in_process import meet_in_run_folder, training_in_process

    if is_importing_task():
        next_earlier_run()
        raise TaskError("a file that workers import calls join(); put it under if __name__ == '__main__'")
    if task is None and not {"model", "loss"} <= functions.keys():
        raise TaskError("join needs model= and loss=, or a task=")
    if worker_entries.script_context is not None:
        with _join_as_worker(worker_entries.script_context, task, functions) as run:
            yield run
        return
    start = CommonStart()
    with start.sharing_errors():
        prepared = prepare(config, task, overrides, code="in the script")
        prepared.show_notes(quiet=quiet)
        plan = PreparedRun.of(prepared, overwrite=overwrite, restarts=start.meet(prepared.source.config))
    plan = start.agree(plan).for_debugging(debug_rank)
    if plan.finished:
        _show_finished(plan, quiet, "; the script ends here, before its loop and what follows it")
        raise SystemExit(0)
    if plan.auto is not None:
        plan = _or_exit(lambda: find_micro(plan, quiet, rerun.find_script_command()))
    if plan.place is None and plan.size > 1:
        _rerun_script_in_workers(plan, quiet)
    early.end_imports()
    made = make_task(task, functions, plan.config, None)
    with meet_in_run_folder(plan, quiet=quiet) as placed, training_in_process(placed, made) as run:
        yield run


def _start_workers(plan: PreparedRun, entry: str, quiet: bool, script: Sequence[str] = ()) -> Path:
    """Start a worker for each rank and wait until all have ended, again after a failure; return the run folder."""
    with (
        plan.create_folder(script) as plan,
        record_run_error(run := plan.out.resolve()),
        Progress(run, plan.config.train.steps, quiet=quiet, goes_on=plan.goes_on) as shown,
        _fork_server(plan, metered := step_log_environment(plan.config), shown.tick) as server,
    ):
        restarts = Restarts(shown, tuple(script))
        while True:
            try:
                with (
                    plan.backend.host(plan.config, plan.size) as environment,
                    WorkerGroup.of(
                        plan.settled,
                        plan.backend,
                        run,
                        entry,
                        {**environment, **metered},
                        pickled_task=plan.ref.pickled_task if plan.ref is not None else b"",
                        starter=server.starter_of(plan.backend),
                        debug_rank=plan.rank_with_terminal,
                    ) as workers,
                ):
                    workers.wait(shown.tick, shown.every)
            except UniparError as e:
                plan = restarts.next_attempt(plan, e)
            else:
                return plan.out


@contextmanager
def _fork_server(
    plan: PreparedRun, metered: Mapping[str, str], tick: Callable[[], None]
) -> Generator[SharedForkServer]:
    """Context manager: the process from which the ranks are forked, once it has imported their libraries."""
    use, patience = may_fork(plan.config, plan.settled.device), plan.config.launch.timeout
    with SharedForkServer(ENTRY_MODULES, metered, use=use, patience=patience) as server:
        with SignalReceiver() as signals:

            def look() -> None:
                if signals.received_signals:
                    raise make_stopped_error(plan.out.resolve(), plan.size, signals.received_signals[0].name)
                tick()

            server.start([plan.backend], look)
            look()
        yield server


def _show_finished(plan: PreparedRun, quiet: bool, more: str = "") -> Path:
    """Print that the run has done all its steps, unless it is quiet; return its folder, in which nothing is changed."""
    if not quiet and (plan.place is None or plan.place.rank == 0):
        sys.stderr.write(f"{plan.finished}{more}\n")
    return plan.out


def _train_in_process(plan: PreparedRun, task: Task, quiet: bool) -> Path:
    from unipar.launcher.in_process import meet_in_run_folder, training_in_process

    with meet_in_run_folder(plan, quiet=quiet) as placed, training_in_process(placed, task) as run:
        run.train()
    return placed.out


def _rerun_script_in_workers(plan: PreparedRun, quiet: bool) -> None:
    """Run this script again in each rank, then exit: the code after `join` runs in the ranks only."""
    script = rerun.find_script_command()
    _or_exit(lambda: _start_workers(plan, "unipar.launcher.worker_entries:rerun_script", quiet, script))
    raise SystemExit(0)


def _or_exit(start: Callable[[], Result]) -> Result:
    """Return what `start` returns; print its error and exit, where the user's script would go on with its loop."""
    try:
        return start()
    except UniparError as e:
        if isinstance(e, WorkerFailed) and e.traceback:
            sys.stderr.write(e.traceback)
        sys.stderr.write(f"unipar: {e}\n")
        raise SystemExit(e.code) from None


def find_micro(plan: PreparedRun, quiet: bool, script: Sequence[str] = ()) -> PreparedRun:
    """Return the run with the microbatch that is found by trial, if its config says auto."""
    from unipar.launcher.micro_batch.choose import choose_microbatch, write_line
    from unipar.launcher.micro_batch.trials import TrialCode

    if plan.micro_note and not quiet:
        write_line(plan.micro_note)
    if plan.auto is None:
        return plan
    limit = usable_memory(plan.config, plan.size)
    return plan.with_micro(
        choose_microbatch([plan.auto], TrialCode(plan.ref, script), limit, _say_nothing if quiet else write_line)
    )


def _say_nothing(line: str) -> None:
    """Show nothing of a line of progress."""


@contextmanager
def _join_as_worker(
    context: worker_entries.ScriptContext, task: type[Task] | None, functions: Mapping[str, TaskFunction]
) -> Generator[Run]:
    """Context manager: the run of a worker that runs the user's script."""
    from unipar.launcher.micro_batch.trial_worker import open_trial, predict_microbatches
    from unipar.training.setup import open_run

    if context.has_joined:
        raise TaskError("join() was called a second time in one script; a script joins one run")
    context.has_joined = True
    settled = read_settled(context.run)
    backend = registry.find_backend(settled.strategy.backend)
    made = make_task(task, functions, settled.config, None)
    folder, rank = context.run, context.place.rank
    launched = read_launch_file(folder)
    if "plan" in launched:  # of batch.micro: auto
        predict_microbatches(made, folder)
        raise SystemExit(0)
    opened = open_trial if "trial" in launched else open_run
    with opened(settled, backend, made, context.place, folder) as run, worker.exit_on_error(folder, rank, run):
        yield run


def _launches_without(out: Path) -> list[str]:
    """Return the results of earlier launches; one whose folder this launch overwrites becomes an error."""
    gone = f"!TaskError: the run in {out} was overwritten by a later one; put launches under if __name__ == '__main__'"
    return [gone if entry == str(out.resolve()) else entry for entry in _earlier_launches]


def _read_report(out: Path, task: type[Task] | None, functions: Mapping[str, TaskFunction]) -> Report:
    """Return the report of a run, which loads its model with the class or functions that the script has."""
    make = partial(_make_task_again, out.absolute(), task, functions) if task is not None or functions else None
    return replace(Report.read(out), make_task=make)


def _make_task_again(out: Path, task: type[Task] | None, functions: Mapping[str, TaskFunction]) -> Task:
    return make_task(task, functions, read_settled(out).config, None)


def _result_of_earlier(entry: str, task: type[Task] | None, functions: Mapping[str, TaskFunction]) -> Report:
    """Return the report of an earlier launch of the same script, or raise the error that it raised."""
    if not entry.startswith("!"):
        return _read_report(Path(entry), task, functions)
    kind, _, sentence = entry[1:].partition(": ")
    raise rebuild(kind, sentence) or WorkerFailed(sentence)
