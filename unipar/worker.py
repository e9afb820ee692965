"""One process of a run: dies with its parent, says why it failed, and does what its entry says."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from unipar import parcel
from unipar.errors import Stopped, TaskError, UniparError
from unipar.files import write_whole
from unipar.orders import Orders, die_with_parent, watch_lifeline
from unipar.place import Place
from unipar.prints import Prints

if TYPE_CHECKING:
    from unipar.loop import TrainingRun


@dataclass
class Context:
    """Who this process is, for `join` in a script that workers run again."""

    place: Place
    run: Path
    joined: bool = False


_AROUND = (__file__, contextlib.__file__)

context: Context | None = None
"""None in every process that is not such a worker."""


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
        parcel.receive(orders.parcel)
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
    from unipar.short import explained

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


def error_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.error.json"


def stack_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.stack"


def log_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.log"


def record(run: Path, rank: int, error: BaseException) -> None:
    """Write down what went wrong, once: the first error is the one that counts."""
    path = error_of(run, rank)
    if path.exists():
        return
    said = {
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, _theirs(error.__traceback__))),
    }
    write_whole(path, json.dumps(said))


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Less the frames of this file and what it is called through."""
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename in _AROUND:
        frames = frames.tb_next
    return frames


def train(place: Place, run: Path, control: socket.socket | None) -> None:
    """The entry of an ordinary run."""
    from unipar import registry
    from unipar.opening import opened
    from unipar.settled import read_settled
    from unipar.task import TaskRef

    settled = read_settled(run)
    backend = registry.find(settled.cell.backend)
    task = TaskRef.from_json(json.loads((run / "launch.json").read_text("utf-8"))["task"]).load()
    if place.rank == 0:
        sys.stdout = Prints(sys.stdout, run)  # not before: what the user's file prints, the script has printed already
    with opened(settled, backend, task, place, run) as training, last_words(run, place.rank, training):
        task.train(training)


def script(place: Place, run: Path, control: socket.socket | None) -> None:
    """The entry of a run whose loop is in the user's own script: run it again, up to its `join` and past it."""
    global context
    context = Context(place, run)
    if place.rank == 0:
        sys.stdout = Prints(sys.stdout, run)
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
    if not context.joined:
        raise TaskError(f"{what} ended in this worker without a join()")


if __name__ == "__main__":
    from unipar import worker  # not this second copy of the module, which nobody else would find

    worker.main(sys.argv[1:])
