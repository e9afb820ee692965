"""A rank's step and phase in a memory-mapped file; a phase in words."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from unipar.run_folder.layout import beat_of

PHASES: Final = ("start", "data", "forward", "backward", "update", "evaluate", "between", "waiting", "end")
"""In the order in which a step meets them; `start` and `waiting` are never counted as silence."""


_ROW = struct.Struct("<qqd")


_PACK, _NOW = _ROW.pack_into, time.monotonic


_CODE = {phase: i for i, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Beat:
    step: int
    phase: str
    when: float  # time.monotonic(), one clock for all processes of a machine


class Heart:
    """The writing end; `mark` costs about a microsecond."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(_ROW.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _ROW.size)
        self.step = 0
        self.heed: Callable[[str], None] | None = None
        """Told of each phase, too."""

        self.mark("start")

    def mark(self, phase: str) -> None:
        _PACK(self._map, 0, self.step, _CODE[phase], _NOW())
        if self.heed is not None:
            self.heed(phase)


def feel(path: Path) -> Beat | None:
    """The last sign of life; None before the first."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < _ROW.size:
        return None
    step, phase, when = _ROW.unpack(raw)
    return Beat(step, PHASES[phase], when) if when else None


_WHERE = {
    "start": "while it was built",
    "data": "while it read the data of step {}",
    "forward": "in the forward of step {}",
    "backward": "in the backward of step {}",
    "update": "in the update of step {}",
    "evaluate": "in the evaluation after step {}",
    "between": "after step {}",
    "waiting": "after step {}",
    "end": "after step {}, its last",
}


@dataclass(frozen=True)
class At:
    """Where a rank was, by its own last sign."""

    phase: str
    step: int

    @classmethod
    def of(cls, run: Path, rank: int) -> At | None:
        beat = feel(beat_of(run, rank))
        return None if beat is None else cls(beat.phase, beat.step)

    @override
    def __str__(self) -> str:
        return _WHERE[self.phase].format(self.step)
