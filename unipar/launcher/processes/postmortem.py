"""Which rank failed first, and why."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from unipar.errors import Stopped, UniparError, WorkerFailed, rebuild
from unipar.launcher.processes.worker_arguments import LOST
from unipar.run_folder.error_file import Said, is_late, said_by
from unipar.run_folder.heartbeat import At, feel
from unipar.run_folder.layout import beat_of, ledger_of, log_of
from unipar.run_folder.ledger import Ledger
from unipar.training.out_of_memory import of_the_dead

SAYINGS = (
    (
        "Received data size doesn't match",
        "some ranks compute what others do not; most often a parameter is unused on some ranks only: "
        "compute it everywhere, times 0.0 where it does not count",
    ),
    (
        "unable to mmap",
        "shared memory ran out (df -h /dev/shm): fewer data.workers, or more of it (docker run --shm-size)",
    ),
    ("std::bad_alloc", "it ran out of memory in a library's code: a smaller batch.micro, or a cell that splits more"),
)
"""What libraries write before they abort, and what it means."""


_ABRUPT = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that nobody gets because a peer failed."""


_IN_VAIN = "it waited for the others until launch.timeout, and which of them kept it waiting cannot be told"


TAIL = 64 * 1024


def stopped(run: Path, rank: int) -> bool:
    """Whether this rank left because a signal had asked it to."""
    said = said_by(run, rank)
    return said is not None and said.kind == Stopped.__name__


def is_echo(run: Path, ended: Iterable[int]) -> bool:
    """Whether these ranks only say that they lost a peer, or waited for one in vain."""
    for rank in ended:
        said = said_by(run, rank)
        if not (said.echo if said else is_late(tail(log_of(run, rank)))):
            return False
    return True


def late(run: Path, ended: Iterable[int]) -> int | None:
    """The rank that waited for others until `launch.timeout`, where that is all that these say."""
    if not is_echo(run, ended):
        return None
    return next((rank for rank in ended if (said := said_by(run, rank)) is None or said.late), None)


def verdict(run: Path, size: int, ended: Mapping[int, int], well: Sequence[int] = ()) -> UniparError:
    """The error of the rank that failed first: `ended` were seen to fail in one look, `well` had finished before."""
    said = {rank: what for rank in range(size) if (what := said_by(run, rank)) is not None and what.kind != "Stopped"}
    spoken = sorted(said, key=lambda rank: (said[rank].echo, said[rank].time))
    silent = sorted((rank for rank in ended if rank not in said), key=lambda rank: _signal(ended[rank]) not in _ABRUPT)
    if silent and (
        not spoken
        or said[spoken[0]].echo
        or _signal(ended[silent[0]]) in _ABRUPT
        or not any(rank in ended for rank in spoken)
    ):
        return _failed(run, silent[0], ended[silent[0]])
    first = spoken[0]
    return _own(run, first, said[first], well if said[first].echo else ())


def _own(run: Path, rank: int, said: Said, well: Sequence[int]) -> UniparError:
    """The rank's own error: as the same type where it is one of ours."""
    log = log_of(run, rank)
    before = f"\n  rank {well[0]} had ended before it, with exit code 0" if well else ""
    late = f"\n  {_IN_VAIN}" if said.late else ""
    text = f"rank {rank} failed: {said.line}{_meaning(log)}{late}{before}\n  its log: {log}"
    failed = WorkerFailed(text, rank=rank, traceback=said.traceback, log=str(log))
    failed.add_note(f"Rank {rank}'s own traceback:\n\n{said.traceback}")  # shown where nobody catches it
    own = rebuild(said.kind, said.message)
    if own is not None:
        own.__cause__ = failed
    return own or failed


def _failed(run: Path, rank: int, code: int) -> WorkerFailed:
    """A rank that could not say why."""
    log = log_of(run, rank)
    by, words = _signal(code), ""
    where = At.of(run, rank)
    at = f" {where}" if where is not None else ""
    if by == "SIGKILL":
        how = f"was killed by SIGKILL{at}: probably out of memory (dmesg tells)"
        words = f"\n  {told}" if (told := of_the_dead(run, rank)) else ""
    elif by:
        how = f"was killed by {by}{at}"
    elif code == LOST:
        how = "ended at once: its parent was gone"
    else:
        how = f"ended with exit code {code}, without an error of its own"
    words += _meaning(log) or _last_words(log)
    return WorkerFailed(f"rank {rank} {how}{words}\n  its log: {log}", rank=rank, traceback=tail(log), log=str(log))


def _signal(code: int) -> str:
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _meaning(log: Path) -> str:
    text = tail(log)
    return next((f"\n  {says}" for sign, says in SAYINGS if sign in text), "")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in tail(log).splitlines() if line.strip()]
    return f"\n  last in its log: {lines[-1][:200]}" if lines else ""


def halted(run: Path, size: int, why: str) -> Stopped:
    """The end that a signal asked for, with the step that was reached."""
    steps = [row["step"] for row in Ledger.read(ledger_of(run, 0)) if row["event"] == "stopped"]
    reached = steps[-1] if steps else max((b.step for r in range(size) if (b := feel(beat_of(run, r)))), default=0)
    where = f"after step {reached}" if reached else "before the first step"
    return Stopped(f"stopped by {why} {where}; what was logged is in {run}")
