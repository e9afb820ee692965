"""A rank's error, written once, and read back."""

from __future__ import annotations

import contextlib
import json
import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from unipar.run_folder.layout import error_of
from unipar.utils.files import write_whole

_ECHOES = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "has been shut down")
"""What a rank says when another one is gone."""


_LATE = (
    re.compile(r"Timed out waiting \d+ms for "),  # gloo
    re.compile(r"Application timeout caused pair closure|: timed out connecting: "),  # gloo
    re.compile(r"(?i)wait timeout after \d+ms|client socket has timed out|timed out after \d+ seconds waiting for"),
    re.compile(r"Watchdog caught collective operation timeout"),  # NCCL
)
"""What a rank says when it has waited for others until `launch.timeout`."""


@dataclass(frozen=True)
class Said:
    """What a rank wrote down as its error."""

    time: float
    kind: str
    message: str
    traceback: str

    @property
    def echo(self) -> bool:
        return self.late or any(words in self.message for words in _ECHOES)

    @property
    def late(self) -> bool:
        return is_late(self.message)

    @property
    def line(self) -> str:
        first = self.message.strip().partition("\n")[0]
        return f"{self.kind}: {first}" if first else self.kind


def said_by(run: Path, rank: int) -> Said | None:
    try:
        return Said(**json.loads(error_of(run, rank).read_text("utf-8")))
    except FileNotFoundError:
        return None


def is_late(text: str) -> bool:
    return any(pattern.search(text) for pattern in _LATE)


_AROUND = (__file__, contextlib.__file__)


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
