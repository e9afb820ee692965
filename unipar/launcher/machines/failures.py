"""Failures of a run on several machines: the first cause reaches all ranks, and rank 0's run folder."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unipar.config import Config
from unipar.distributed.meeting.machine_watch import MachineWatch
from unipar.errors import Stopped, UniparError, WorkerFailed, rebuild
from unipar.run_folder.error_file import describe_error, is_consequence, write_error, write_failure

if TYPE_CHECKING:
    from unipar.distributed.meeting.world_session import Session

_LONGEST_TRACEBACK: Final = 20_000
"""Characters of a traceback, from its end, that are sent to rank 0."""


@contextmanager
def sharing_failures(config: Config, session: Session, run: Path) -> Generator[MachineWatch]:
    """Context manager: an error of one rank, or its loss, becomes the error of all; yields the watch over them."""
    watch = _open_watch(config, session, run)
    try:
        yield watch
    except Stopped:
        raise
    except BaseException as e:
        if not is_consequence(str(e)):
            watch.fail(_described(e, session))
            raise
        cause = watch.cause()
        if cause is None:
            raise
        raise _error_of(cause, session) from e
    finally:
        watch.close()
        if session.place.rank == 0:
            for failure in watch.failures:
                write_failure(run, failure["rank"], failure["error"], failure["message"], failure.get("traceback", ""))


def _open_watch(config: Config, session: Session, run: Path) -> MachineWatch:
    """Return the watch of this rank."""
    key = "heartbeat" if config.launch.heartbeat is not None else "timeout"
    silence: float = getattr(config.launch, key)

    def end(cause: Mapping[str, Any]) -> None:
        error = _error_of(cause, session)
        write_error(run, session.place.rank, error)
        sys.stderr.write(f"unipar: {error}\n")
        sys.stderr.flush()
        os._exit(error.code)

    return MachineWatch(session, silence, f"launch.{key}", end)


def _described(error: BaseException, session: Session) -> dict[str, Any]:
    """Return what the other ranks are told of an error of this rank."""
    kind, rank = type(error).__name__, session.place.rank
    own = isinstance(error, UniparError)
    text = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    first = str(error) if own else describe_error(kind, str(error), text)
    return {
        "kind": kind if own else WorkerFailed.__name__,
        "message": f"rank {rank} on {session.machines.of(rank)} failed: {first}",
        "error": kind,
        "traceback": text,
    }


def _error_of(cause: Mapping[str, Any], session: Session) -> UniparError:
    """Return the error with which a rank ends whose world has failed for this cause."""
    rank, kind = int(cause["rank"]), str(cause["kind"])
    text = cause.get("traceback", "")
    failed = WorkerFailed(str(cause["message"]), rank=rank, traceback=text)
    if text:
        failed.add_note(f"Rank {rank}'s own traceback:\n\n{text}")
    own = rebuild(kind, str(cause["message"])) if kind != WorkerFailed.__name__ else None
    if own is not None:
        own.__cause__ = failed
    return own or failed
