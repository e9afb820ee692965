"""Main function of a worker: run the entry, record an error, end with the parent."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from unipar.distributed.flight_recorder import record_on_signal
from unipar.distributed.place import Place
from unipar.errors import Stopped, UniparError
from unipar.launcher.processes.signals import STACK_SIGNAL
from unipar.launcher.processes.worker_arguments import WorkerArguments, die_when_pipe_closes, die_with_parent
from unipar.run_folder.error_file import write_error
from unipar.run_folder.layout import collectives_path, stack_path
from unipar.task import pickled

if TYPE_CHECKING:
    from unipar.training.training_run import TrainingRun

_HIDDEN_FILES = (__file__, str(Path(__file__).parents[1] / "worker_entries.py"), contextlib.__file__)
"""Files whose frames stand above the user's code in every traceback of a worker."""


def run_worker(arguments: WorkerArguments) -> NoReturn:
    """Run the worker's entry and exit."""
    die_with_parent(arguments.parent, signal.SIGKILL if arguments.dies_with_thread else None)
    die_when_pipe_closes(arguments.parent_alive_fd, arguments.folder)
    # From here on the thread that waits for the pipe ends this process, its data workers and the folder. SIGCONT
    # instead of SIGKILL: it wakes a stopped process, which could not read the pipe, and does no harm if only the
    # thread that started this worker ends.
    die_with_parent(arguments.parent, signal.SIGCONT)
    run = Path(arguments.run)
    if arguments.pickled_task_fd >= 0:
        pickled.receive_task(arguments.pickled_task_fd)
    _use_temporary_folder(arguments.folder)
    faulthandler.enable()
    stack = stack_path(run, arguments.rank).open("w", encoding="utf-8")
    record_on_signal(STACK_SIGNAL, collectives_path(run, arguments.rank))
    faulthandler.register(STACK_SIGNAL, stack, chain=True)
    if arguments.terminal >= 0:
        from unipar.launcher.processes.debugger import give_terminal_to_debugger

        give_terminal_to_debugger(run, arguments.terminal)
    try:
        _import_entry(arguments.entry)(_place_of_worker(arguments), run, _control_socket(arguments.control))
    except SystemExit as e:
        if code := _exit_code(e):
            write_error(run, arguments.rank, e, _HIDDEN_FILES)
        _exit_now(code)
    except BaseException as e:
        record_error_and_exit(run, arguments.rank, e)
    _exit_now(0)


def record_error_and_exit(run: Path, rank: int, error: BaseException) -> NoReturn:
    """Record the error and exit before connections are closed, so that other ranks' errors have a later time."""
    write_error(run, rank, error, _HIDDEN_FILES)
    traceback.print_exception(error)
    _exit_now(error.code if isinstance(error, UniparError) else 1)


@contextlib.contextmanager
def exit_on_error(run: Path, rank: int, live: TrainingRun) -> Generator[None]:
    """Context manager around a loop: an error ends this worker before the outer contexts are closed."""
    from unipar.training.out_of_memory import as_out_of_memory

    try:
        yield
    except (Stopped, SystemExit):
        raise  # all ranks stop together here, so the outer contexts can be closed in order
    except BaseException as e:
        record_error_and_exit(run, rank, as_out_of_memory(e, run, rank, live))


def _exit_now(code: int) -> NoReturn:
    """Exit by os._exit: normal shutdown aborts about one time in six, because library threads are still waiting."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code & 0xFF
    if end.code is not None:
        sys.stderr.write(f"{end.code}\n")
    return 0 if end.code is None else 1


def _use_temporary_folder(folder: str) -> None:
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # a forked worker may have inherited its parent's value


def _import_entry(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _place_of_worker(arguments: WorkerArguments) -> Place:
    return Place(
        rank=arguments.rank,
        size=arguments.size,
        local_rank=arguments.local_rank,
        local_size=arguments.local_size,
        launcher="unipar",
        address=(arguments.host, arguments.port) if arguments.port else None,
        listener=arguments.listener if arguments.listener >= 0 else None,
    )


def _control_socket(fd: int) -> socket.socket | None:
    return socket.socket(fileno=fd) if fd >= 0 else None


if __name__ == "__main__":
    from unipar.launcher.processes import worker  # `__main__` is a second copy of the module; others import this one

    worker.run_worker(WorkerArguments.read(sys.argv[1:]))
