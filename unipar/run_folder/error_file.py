"""Error file of a rank: writing it once, and reading it."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from unipar.run_folder.layout import error_path, run_error_path
from unipar.utils.files import write_file_atomically
from unipar.utils.tracebacks import from_user_code, user_place

_PEER_GONE_WORDS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "has been shut down",
    "Connection was likely closed",  # torch's store, which is in rank 0
)
"""Parts of the error messages of a rank whose peer has ended."""

_TIMEOUT_PATTERNS = (
    re.compile(r"Timed out waiting \d+ms for "),  # gloo
    re.compile(r"Application timeout caused pair closure|: timed out connecting: "),  # gloo
    re.compile(r"(?i)wait timeout after \d+ms|client socket has timed out|timed out after \d+ seconds waiting for"),
    re.compile(r"Watchdog caught collective operation timeout"),  # NCCL
)
"""Patterns of the error messages of a rank that has waited for other ranks until `launch.timeout`."""


@dataclass(frozen=True)
class RecordedError:
    """Contents of a rank's error file."""

    time: float
    kind: str
    message: str
    traceback: str

    @property
    def caused_by_other_rank(self) -> bool:
        """Whether the error only reports that another rank has ended or did not answer in time."""
        return is_consequence(self.message)

    @property
    def timed_out(self) -> bool:
        """Whether the rank waited in vain for other ranks."""
        return is_timeout(self.message)

    @property
    def line(self) -> str:
        """The error's type, the first line of its message and the place in the user's code."""
        return describe_error(self.kind, self.message, self.traceback)


def describe_error(kind: str, message: str, trace: str) -> str:
    """Return an error in one line: "ValueError: bad value (train.py:41, in loss)"."""
    first, _, rest = message.strip().partition("\n")
    if first.startswith("Caught ") and (own := rest.strip().rpartition("\n")[2]).startswith(f"{kind}: "):
        first = f"{own.removeprefix(f'{kind}: ')}, {first.removeprefix('Caught ').removeprefix(kind).strip(' .')}"
    place = "" if kind == KeyboardInterrupt.__name__ else user_place(trace)
    return (f"{kind}: {first}" if first else kind) + (f" ({place})" if place else "")


def read_error(run: Path, rank: int) -> RecordedError | None:
    """Return the error that a rank wrote, or None if it wrote none."""
    return read_error_file(error_path(run, rank))


def read_run_error(run: Path) -> RecordedError | None:
    """Return the error with which the run as a whole ended, or None if none was recorded."""
    return read_error_file(run_error_path(run))


def read_error_file(path: Path) -> RecordedError | None:
    """Return the error in a file, or None if there is no such file."""
    try:
        return RecordedError(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None


def is_consequence(text: str) -> bool:
    """Return whether a message only reports that another rank has ended or did not answer in time."""
    return is_timeout(text) or any(words in text for words in _PEER_GONE_WORDS)


def is_timeout(text: str) -> bool:
    """Return whether a message reports that a rank waited in vain for other ranks."""
    return any(pattern.search(text) for pattern in _TIMEOUT_PATTERNS)


def write_error(run: Path, rank: int, error: BaseException, hidden: Collection[str] = ()) -> None:
    """Write an error to the rank's error file, unless an earlier error is there: the first one is the cause.

    Its traceback begins in the user's code; if that has no frame, leading frames of `hidden` files are left out.
    """
    _write(error_path(run, rank), error, hidden)


def write_failure(run: Path, rank: int, kind: str, message: str, trace: str) -> None:
    """Write what another rank has told of its error to that rank's error file, unless it has written one itself."""
    _write_row(error_path(run, rank), {"time": time.time(), "kind": kind, "message": message, "traceback": trace})


@contextmanager
def record_run_error(run: Path) -> Generator[None]:
    """Context manager: writes an error of the body to the run folder, for those that look at the run later."""
    try:
        yield
    except BaseException as e:
        with suppress(OSError):
            _write(run_error_path(run), e, ())
        raise


def _write(path: Path, error: BaseException, hidden: Collection[str]) -> None:
    frames = _without_hidden_frames(from_user_code(error.__traceback__), hidden)
    row = {
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, frames)),
    }
    _write_row(path, row)


def _write_row(path: Path, row: Mapping[str, Any]) -> None:
    if not path.exists():
        write_file_atomically(path, json.dumps(row))


def _without_hidden_frames(frames: TracebackType | None, hidden: Collection[str]) -> TracebackType | None:
    """Return a traceback without its leading frames of hidden files."""
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename in hidden:
        frames = frames.tb_next
    return frames
