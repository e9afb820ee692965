"""Training in this process, under a foreign launcher or alone."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from unipar.distributed.launchers import without_launcher_arguments
from unipar.distributed.place import Place
from unipar.errors import Stopped, WorldMismatch
from unipar.launcher.prepare import PreparedRun
from unipar.launcher.processes.worker_arguments import die_with_parent
from unipar.launcher.progress import Progress
from unipar.run_folder.error_file import write_error
from unipar.training.out_of_memory import explain_out_of_memory
from unipar.utils.files import write_file_atomically
from unipar.utils.procfs import BEGAN, PARENT, process_stat

if TYPE_CHECKING:
    from unipar.task import Task
    from unipar.training.run import TrainingRun


SINGLE_PLACE = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")
"""Place of the only rank of a world of one."""


@contextmanager
def training_in_process(plan: PreparedRun, task: Task, *, quiet: bool = False) -> Generator[TrainingRun]:
    """Context manager: a run in this process with the loop as body; errors are recorded as in a worker, and raised."""
    from unipar.training.setup import open_run

    place = plan.place or SINGLE_PLACE
    run = plan.out.resolve()
    if not place.started_by_unipar:
        sys.argv[:] = without_launcher_arguments(sys.argv)
        _die_with_launcher(place.between)
    with ExitStack() as stack:
        if place.rank == 0:
            stack.enter_context(plan.create_folder())
            stack.enter_context(_announce_run_folder(run, place))
            shown = stack.enter_context(Progress(run, plan.config.train.steps, quiet=quiet, prints=False))
            stack.enter_context(shown.tick_in_background())
        else:
            _wait_for_run_folder(run, place, plan.config.launch.timeout)
        try:
            with (
                open_run(plan.settled, plan.backend, task, place, run) as training,
                explain_out_of_memory(run, place.rank, training),
            ):
                _remove_started_mark(run, place)  # every rank has joined the process group
                yield training
        except Stopped:
            raise
        except BaseException as e:
            write_error(run, place.rank, e)
            raise


@cache
def _die_with_launcher(between: int) -> None:
    """Have this process killed when its launcher ends, which leaves its processes behind when it is killed itself."""
    parent = os.getppid()
    for _ in range(between):
        parent = int(process_stat(parent)[PARENT])
    if parent > 1 and parent != os.getppid():
        watched = os.pidfd_open(parent)
        threading.Thread(target=_die_after, args=(watched,), name="launcher", daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        die_with_parent(os.getppid(), signal.SIGKILL)


def _die_after(launcher: int) -> None:
    """Wait for the end of the process behind this pidfd, then kill this process."""
    select.select([launcher], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _started_mark_path(run: Path, place: Place) -> Path:
    """Return the path of the file that says that rank 0 has made the run folder; its name is this world's alone."""
    world = [place.launcher, place.job, place.address, os.environ.get("TORCHELASTIC_RUN_ID")]
    return run / f".started-{hashlib.sha256(repr(world).encode()).hexdigest()[:12]}"


@contextmanager
def _announce_run_folder(run: Path, place: Place) -> Generator[None]:
    """Context manager: tell the other ranks by a file that the run folder is made; remove the file at the end."""
    mark = _started_mark_path(run, place)
    if place.size > 1:
        write_file_atomically(mark, json.dumps([_process_namespace(), os.getpid(), process_stat("self")[BEGAN]]))
    try:
        yield
    finally:
        _remove_started_mark(run, place)


def _remove_started_mark(run: Path, place: Place) -> None:
    _started_mark_path(run, place).unlink(missing_ok=True)
    if place.meeting is not None:
        place.meeting.unlink(missing_ok=True)


def _wait_for_run_folder(run: Path, place: Place, patience: float) -> None:
    """Wait until rank 0 has made the run folder, for at most `patience` seconds."""
    until = time.monotonic() + patience
    while not _is_left_by_live_rank(_started_mark_path(run, place)):
        if time.monotonic() > until:
            raise WorldMismatch(f"rank {place.rank} waited {patience:g} s for rank 0 to make {run}")
        time.sleep(0.02)


def _is_left_by_live_rank(mark: Path) -> bool:
    """Return whether the rank that wrote this file is alive: a killed run leaves a file of the same name behind."""
    try:
        here, pid, began = json.loads(mark.read_bytes())
        return here != _process_namespace() or process_stat(pid)[BEGAN] == began
    except (FileNotFoundError, ProcessLookupError):
        return False


def _process_namespace() -> list[str]:
    """Return the boot and the PID namespace in which process ids are unique."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip(), os.readlink("/proc/self/ns/pid")]
