"""Search for the rank that failed first, and for the reason."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from unipar.errors import Stopped, UniparError, WorkerFailed, rebuild
from unipar.launcher.processes.worker_arguments import PARENT_GONE_EXIT_CODE
from unipar.run_folder.checkpoint_lines import describe_way_on
from unipar.run_folder.error_file import RecordedError, is_timeout, read_error
from unipar.run_folder.heartbeat import LastPhase, read_heartbeat
from unipar.run_folder.layout import heartbeat_path, log_path, run_log_path
from unipar.run_folder.run_attempts import reached_step
from unipar.run_folder.run_log import RunLog
from unipar.training.out_of_memory import describe_killed_rank, why_memory_ran_out
from unipar.utils.procfs import OomKillCount

KNOWN_ABORT_MESSAGES = (
    (
        "Received data size doesn't match",
        "some ranks compute what others do not; most often a parameter is unused on some ranks only: "
        "compute it everywhere, times 0.0 where it does not count",
    ),
    (
        "unable to mmap",
        "shared memory ran out (df -h /dev/shm): fewer data.workers, or more of it (docker run --shm-size)",
    ),
    (
        "std::bad_alloc",
        "it ran out of memory in a library's code: a smaller batch.micro, or a strategy that splits more",
    ),
)
"""Pairs of a text that libraries write before they abort, and an explanation."""


_CRASH_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that are never the consequence of another rank's failure."""


_TIMEOUT_NOTE = "it waited for the other ranks until launch.timeout; which of them was late is not known"


_QUIT_NOTE = (
    "a debugger was left by q, or had no terminal: breakpoint() needs a single rank (--backend single) or "
    "--debug-rank N (launch(..., debug_rank=N))"
)


LOG_TAIL_BYTES = 64 * 1024
"""Bytes at the end of a log in which an explanation is searched."""


def was_stopped(run: Path, rank: int) -> bool:
    """Return whether this rank ended because a signal had asked it to stop."""
    error = read_error(run, rank)
    return error is not None and error.kind == Stopped.__name__


def is_only_lost_peers(run: Path, ended: Iterable[int]) -> bool:
    """Return whether all these ranks only report that they lost another rank, or waited too long for one."""
    for rank in ended:
        error = read_error(run, rank)
        if not (error.caused_by_other_rank if error else is_timeout(read_log_tail(log_path(run, rank)))):
            return False
    return True


def find_timed_out_rank(run: Path, ended: Iterable[int]) -> int | None:
    """Return the rank that waited for others until `launch.timeout`, or None if one of these reports another error."""
    if not is_only_lost_peers(run, ended):
        return None
    return next((rank for rank in ended if (error := read_error(run, rank)) is None or error.timed_out), None)


def find_first_failure(
    run: Path,
    size: int,
    ended: Mapping[int, int],
    well: Sequence[int] = (),
    *,
    kills_before: OomKillCount | None = None,
) -> UniparError:
    """Return the error of the rank that failed first.

    `ended`: exit codes of the ranks that were found failed together; `well`: ranks that had ended with code 0 before;
    `kills_before`: how many processes the kernel had killed for lack of memory when the ranks started.
    """
    errors = {
        rank: error for rank in range(size) if (error := read_error(run, rank)) is not None and error.kind != "Stopped"
    }
    recorded = sorted(errors, key=lambda rank: (errors[rank].caused_by_other_rank, errors[rank].time))
    silent = sorted(
        (rank for rank in ended if rank not in errors), key=lambda rank: _signal_name(ended[rank]) not in _CRASH_SIGNALS
    )
    if silent and (
        not recorded
        or errors[recorded[0]].caused_by_other_rank
        or _signal_name(ended[silent[0]]) in _CRASH_SIGNALS
        or not any(rank in ended for rank in recorded)
    ):
        return _unrecorded_failure(run, silent[0], ended[silent[0]], kills_before)
    first = recorded[0]
    return _recorded_failure(run, first, errors[first], well if errors[first].caused_by_other_rank else ())


def _recorded_failure(run: Path, rank: int, error: RecordedError, well: Sequence[int]) -> UniparError:
    """Return the error that the rank recorded: of its own type if that is a UniparError, else WorkerFailed."""
    log = log_path(run, rank)
    before = f"\n  rank {well[0]} had ended before it, with exit code 0" if well else ""
    late = f"\n  {_TIMEOUT_NOTE}" if error.timed_out else f"\n  {_QUIT_NOTE}" if error.kind == "BdbQuit" else ""
    text = f"rank {rank} failed: {error.line}{_explain_log(log)}{late}{before}\n  its log: {log}"
    failed = WorkerFailed(text, rank=rank, traceback=error.traceback, log=str(log))
    failed.add_note(f"Rank {rank}'s own traceback:\n\n{error.traceback}")  # Python shows it if nobody catches the error
    own = rebuild(error.kind, error.message)
    if own is not None:
        own.__cause__ = failed
    return own or failed


def _unrecorded_failure(run: Path, rank: int, code: int, kills_before: OomKillCount | None) -> WorkerFailed:
    """Return the error of a rank that ended without recording one."""
    log = log_path(run, rank)
    by, words = _signal_name(code), ""
    where = LastPhase.of(run, rank)
    at = f" {where}" if where is not None else ""
    if by == "SIGKILL" and (why := why_memory_ran_out(run, rank, kills_before)):
        how = f"was killed by SIGKILL{at}: probably out of memory: {why}"
        words = f"\n  {memory}" if (memory := describe_killed_rank(run, rank)) else ""
    elif by == "SIGKILL" and kills_before is not None:
        how = (
            f"was killed by SIGKILL{at}, from outside: by a person, a scheduler or a time limit; "
            "the kernel counted no process killed for lack of memory"
        )
    elif by == "SIGKILL":
        how = (
            f"was killed by SIGKILL{at}, from outside: by a person, a scheduler, "
            "or the kernel if memory ran out (see dmesg)"
        )
    elif by:
        how = f"was killed by {by}{at}"
    elif code == PARENT_GONE_EXIT_CODE:
        how = "ended at once: its parent had ended"
    else:
        how = f"ended with exit code {code}, without an error of its own"
    words += _explain_log(log) or _last_log_line(log)
    return WorkerFailed(
        f"rank {rank} {how}{words}\n  its log: {log}", rank=rank, traceback=read_log_tail(log), log=str(log)
    )


def _signal_name(code: int) -> str:
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def read_log_tail(log: Path) -> str:
    """Return the end of a log, or "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _explain_log(log: Path) -> str:
    text = read_log_tail(log)
    return next((f"\n  {says}" for sign, says in KNOWN_ABORT_MESSAGES if sign in text), "")


def _last_log_line(log: Path) -> str:
    lines = [line.strip() for line in read_log_tail(log).splitlines() if line.strip()]
    return f"\n  last in its log: {lines[-1][:200]}" if lines else ""


def make_stopped_error(run: Path, size: int, why: str) -> Stopped:
    """Return the error of a run that a signal or its deadline stopped, with the step that was reached."""
    stops = [row for row in RunLog.read(run_log_path(run, 0)) if row["event"] == "stopped"]
    if stops:
        reached = stops[-1]["step"]
        why = own if (own := stops[-1].get("why", "")).startswith("launch.") else why
    else:
        beats = [b.step for r in range(size) if (b := read_heartbeat(heartbeat_path(run, r))) is not None]
        reached = max([*beats, reached_step(run)])
    where = f"after step {reached}" if reached else "before the first step"
    way_on = describe_way_on(run, reached)
    return Stopped(f"stopped by {why} {where}; what was logged is in {run}" + (f"; {way_on}" if way_on else ""))
