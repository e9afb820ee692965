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
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from unipar.distributed.launchers import without_launcher_arguments
from unipar.distributed.place import Place
from unipar.errors import Stopped, UniparError, WorldMismatch
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.launcher.processes.debugger import call_before_debugger, stop_drawing
from unipar.launcher.processes.recompute import plan_recompute
from unipar.launcher.processes.worker_arguments import die_with_parent
from unipar.launcher.progress import Progress
from unipar.run_folder.error_file import write_error
from unipar.run_folder.folder import existing_numbered_folders
from unipar.run_folder.layout import debugging_path
from unipar.training.out_of_memory import explain_out_of_memory
from unipar.utils.files import write_file_atomically
from unipar.utils.procfs import BEGAN, PARENT, boot_id, process_stat
from unipar.utils.tracebacks import user_place_of

if TYPE_CHECKING:
    from unipar.distributed.meeting.machine_watch import MachineWatch
    from unipar.distributed.world import World
    from unipar.task import Task
    from unipar.training.training_run import TrainingRun


SINGLE_PLACE = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")
"""Place of the only rank of a world of one."""


@contextmanager
def meet_in_run_folder(plan: PreparedRun, *, quiet: bool = False) -> Generator[PreparedRun]:
    """Context manager: rank 0 creates the run folder and shows the progress; yields the run with that folder.

    The other ranks learn from rank 0 which folder that is: through the store, or from a file in the folder.
    """
    place = plan.place or SINGLE_PLACE
    if not place.started_by_unipar:
        sys.argv[:] = without_launcher_arguments(sys.argv)
        _die_with_launcher(place.between)
    patience, by_store = plan.config.launch.timeout, plan.numbered is not None and place.address is not None
    with ExitStack() as stack:
        if place.several_machines:
            placed = stack.enter_context(_folder_on_all_machines(plan, place))
            if place.rank == 0:
                stack.enter_context(_progress(placed, quiet=quiet))
        elif place.rank == 0:
            placed = stack.enter_context(plan.create_folder())
            run = placed.out.resolve()
            stack.enter_context(_announce_run_folder(run, place))
            stack.enter_context(_progress(placed, quiet=quiet))
            if by_store:
                _folder_of_store(place, patience, placed.out)
        elif by_store:
            placed = plan.in_folder(_folder_of_store(place, patience))
        else:
            placed = plan.in_folder(_wait_for_run_folder(plan.out, place, patience, plan.numbered))
        yield placed


@contextmanager
def _progress(plan: PreparedRun, *, quiet: bool) -> Generator[None]:
    steps, run = plan.config.train.steps, plan.out.resolve()
    with Progress(run, steps, quiet=quiet, prints=False, goes_on=plan.goes_on) as shown, shown.tick_in_background():
        undo = call_before_debugger(partial(stop_drawing, run))
        try:
            yield
        finally:
            undo()
            debugging_path(run).unlink(missing_ok=True)


def _folder_on_all_machines(plan: PreparedRun, place: Place) -> AbstractContextManager[PreparedRun]:
    from unipar.backend.joining import join_session
    from unipar.launcher.machines.folders import run_folder_on_all_machines

    return run_folder_on_all_machines(plan, join_session(plan.config, place))


def _watching_machines(plan: PreparedRun, place: Place, run: Path) -> AbstractContextManager[MachineWatch | None]:
    """Return a context manager that has all ranks end with one error, where they are on several machines."""
    if not place.several_machines:
        return nullcontext()
    from unipar.backend.joining import join_session
    from unipar.launcher.machines.failures import sharing_failures

    return sharing_failures(plan.config, join_session(plan.config, place), run)


def _run_log_exchange(plan: PreparedRun, run: Path) -> Callable[[World], None] | None:
    """Return what gives rank 0 the run logs of ranks that do not see its run folder; None if all see it."""
    if not plan.remote_ranks:
        return None
    from unipar.launcher.machines.run_logs import exchange_run_logs

    return partial(exchange_run_logs, run=run, remote_ranks=frozenset(plan.remote_ranks))


@contextmanager
def training_in_process(plan: PreparedRun, task: Task) -> Generator[TrainingRun]:
    """Context manager: a run in this process with the loop as body; errors are recorded as in a worker, and raised."""
    from unipar.training.setup import open_run

    run, place = plan.out.resolve(), plan.place or SINGLE_PLACE
    if place.folder is not None:
        place = replace(place, folder=run)
    try:
        with (
            _watching_machines(plan, place, run) as watch,
            open_run(
                plan.settled,
                plan.backend,
                task,
                place,
                run,
                at_end=_run_log_exchange(plan, run),
                plan_recompute=plan_recompute,
            ) as training,
            explain_out_of_memory(run, place.rank, training),
        ):
            if watch is not None:
                watch.step = lambda: training.done
            _remove_started_mark(run, place)  # every rank has joined the process group
            yield training
    except Stopped:
        raise
    except BaseException as e:
        write_error(run, place.rank, e)
        if not isinstance(e, UniparError) and (at := user_place_of(e)):
            e.add_note(f"rank {place.rank} failed at {at}")
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
    # the address of a world on one machine, such as 127.0.0.1:29500, may be that of a world on another machine as well
    machine = boot_id() if place.local_size == place.size else None
    world = [place.launcher, place.job, place.address, os.environ.get("TORCHELASTIC_RUN_ID"), machine]
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
    if place.folder is not None and (meeting := replace(place, folder=run).meeting) is not None:
        meeting.unlink(missing_ok=True)


def _folder_of_store(place: Place, patience: float, out: Path | None = None) -> Path:
    """Return the folder that rank 0 has claimed, and gives as `out`."""
    from unipar.distributed.meeting.world_session import session_of

    _folders_met.append(out)
    key, store = f"unipar/folder/{len(_folders_met)}", session_of(place, patience, patience).store
    if out is not None:
        store.set(key, str(out))
        return out
    try:
        return Path(store.get(key).decode())
    except RuntimeError:
        raise WorldMismatch(f"rank {place.rank} waited {patience:g} s for rank 0 to make its run folder") from None


_folders_met: list[Path | None] = []
"""An entry for each run of this process whose ranks agreed on a folder through the store; all ranks have as many."""


def _wait_for_run_folder(out: Path, place: Place, patience: float, numbered: Path | None = None) -> Path:
    """Wait until rank 0 has made `out`, or a folder of `numbered`; return the folder that it has made."""
    until = time.monotonic() + patience
    while True:
        for run in [out] if numbered is None else existing_numbered_folders(numbered):
            if _is_left_by_live_rank(_started_mark_path(run, place)):
                return run
        if time.monotonic() > until:
            name = out if numbered is None else f"a run folder ({numbered}, {numbered.name}-2, ...)"
            raise WorldMismatch(f"rank {place.rank} waited {patience:g} s for rank 0 to make {name}")
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
    return [boot_id(), os.readlink("/proc/self/ns/pid")]
