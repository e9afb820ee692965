"""A worker's life: dies with its parent, records its error."""

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

from unipar.distributed.place import Place
from unipar.errors import Stopped, UniparError
from unipar.launcher.processes.worker_arguments import Orders, die_with_parent, watch_lifeline
from unipar.run_folder.error_file import record
from unipar.run_folder.layout import stack_of
from unipar.task import pickled

if TYPE_CHECKING:
    from unipar.training.run import TrainingRun


def main(words: list[str]) -> None:
    serve(Orders.read(words))


def serve(orders: Orders) -> NoReturn:
    """A worker's whole life."""
    die_with_parent(orders.parent, signal.SIGKILL if orders.mortal else None)
    watch_lifeline(orders.lifeline, orders.folder)
    # From here on the lifeline does it, and takes data workers and the folder along. SIGCONT: a stopped process
    # cannot read; and a thread that started us may end without any harm.
    die_with_parent(orders.parent, signal.SIGCONT)
    run = Path(orders.run)
    if orders.parcel >= 0:
        pickled.receive(orders.parcel)
    _own_folder(orders.folder)
    faulthandler.enable()
    stack = stack_of(run, orders.rank).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, stack)
    try:
        _entry(orders.entry)(_place(orders), run, _control(orders.control))
    except SystemExit as e:
        if code := _code(e):
            record(run, orders.rank, e)
        _leave(code)
    except BaseException as e:
        fail(run, orders.rank, e)
    _leave(0)


def fail(run: Path, rank: int, error: BaseException) -> NoReturn:
    """Say why and go, before anything is closed: what a peer sees of our end must come after our own words."""
    record(run, rank, error)
    traceback.print_exception(error)
    _leave(error.code if isinstance(error, UniparError) else 1)


@contextlib.contextmanager
def last_words(run: Path, rank: int, live: TrainingRun) -> Generator[None]:
    """Around a loop: its error ends this worker before what is around it is closed."""
    from unipar.training.out_of_memory import explained

    try:
        yield
    except (Stopped, SystemExit):
        raise  # in order: all ranks stop together, and close what they have open
    except BaseException as e:
        fail(run, rank, explained(e, run, rank, live))


def _leave(code: int) -> NoReturn:
    """Without the interpreter's end: threads of libraries that still wait would abort it, one time in six."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _code(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code & 0xFF
    if end.code is not None:
        sys.stderr.write(f"{end.code}\n")
    return 0 if end.code is None else 1


def _own_folder(folder: str) -> None:
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # a forked worker may have its parent's


def _entry(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _place(orders: Orders) -> Place:
    return Place(
        rank=orders.rank,
        size=orders.size,
        local_rank=orders.rank,
        local_size=orders.size,
        launcher="unipar",
        address=("127.0.0.1", orders.port) if orders.port else None,
        listener=orders.listener if orders.listener >= 0 else None,
    )


def _control(fd: int) -> socket.socket | None:
    return socket.socket(fileno=fd) if fd >= 0 else None


if __name__ == "__main__":
    from unipar.launcher.processes import worker  # not this second copy of the module, which nobody else would find

    worker.main(sys.argv[1:])
