"""Training in this very process: one rank of a world that a foreign launcher made, or a world of one."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unipar.errors import Stopped, WorldMismatch
from unipar.orders import die_with_parent
from unipar.place import Place, without_launcher_arguments
from unipar.plan import Plan
from unipar.progress import Progress
from unipar.worker import record

if TYPE_CHECKING:
    from unipar.loop import Run
    from unipar.task import Task

ALONE = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")


@contextmanager
def trained(plan: Plan, task: Task, *, quiet: bool = False) -> Generator[Run]:
    """A run in this process; its body is the loop. Errors are written down as a worker's are, and raised."""
    from unipar.opening import opened

    place = plan.place or ALONE
    run = plan.out.resolve()
    if not place.ours:
        sys.argv[:] = without_launcher_arguments(sys.argv)
        _die_with_launcher()
    with ExitStack() as stack:
        if place.rank == 0:
            stack.enter_context(plan.made())
            _announce(run, place)
            shown = stack.enter_context(Progress(run, plan.config.train.steps, quiet=quiet, prints=False))
            stack.enter_context(shown.ticking())
        else:
            _wait(run, place, plan.config.launch.timeout)
        try:
            with opened(plan.config, task, place, run) as training:
                for seen in (_mark(place), f".meet-{place.launcher}-{place.job}"):  # all have met by now
                    (run / seen).unlink(missing_ok=True)
                yield training
        except Stopped:
            raise
        except BaseException as e:
            record(run, place.rank, e)
            raise


def _die_with_launcher() -> None:
    """What foreign launchers leave behind when they are killed themselves is theirs no more."""
    if threading.current_thread() is threading.main_thread():
        die_with_parent(os.getppid(), signal.SIGKILL)


def _mark(place: Place) -> str:
    """The name of a file that only the ranks of this very start look for: an older run's may lie in the folder."""
    told = [place.launcher, place.job, place.address, os.environ.get("TORCHELASTIC_RUN_ID")]
    if place.address is not None and place.local_size == place.size:
        told += [os.getppid(), _began(os.getppid())]  # one launcher process started all of them
    return f".started-{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}"


def _began(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[19]


def _announce(run: Path, place: Place) -> None:
    if place.size > 1:
        (run / _mark(place)).touch()


def _wait(run: Path, place: Place, patience: float) -> None:
    """Until rank 0 has made the run folder."""
    until = time.monotonic() + patience
    while not (run / _mark(place)).exists():
        if time.monotonic() > until:
            raise WorldMismatch(f"rank {place.rank} waited {patience:g} s for rank 0 to make {run}")
        time.sleep(0.02)
