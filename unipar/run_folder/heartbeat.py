"""Heartbeat of a rank: its step and phase in a memory-mapped file; phases in words."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from unipar.run_folder.layout import heartbeat_path

STEP_PHASES: Final = ("start", "data", "forward", "backward", "update", "evaluate", "save", "between", "waiting", "end")
"""Phases in the order of a step; a rank in `start` or `waiting` never counts as hung."""

_ROW = struct.Struct("<qqd")

READING_ON: Final = "reading on"
"""Work of a rank that reads samples of a stream that were read before, up to the place from which the run goes on."""

MEASURING: Final = "measuring lengths"
"""Work of a rank that counts the tokens of its part of the samples, before batches of tokens are planned."""

LONG_WORKS: Final = ("", "saving", "verifying the checkpoint", "loading the checkpoint", READING_ON, MEASURING)
"""Works besides training that may last; "" is none."""

_WORK = struct.Struct("<qqq")

_SIZE = _ROW.size + _WORK.size

_NOW = time.monotonic

_PHASE_NUMBERS = {phase: i for i, phase in enumerate(STEP_PHASES)}


@dataclass(frozen=True)
class LongWork:
    """Work of a rank that may last, and how far it has come."""

    name: str
    """One of LONG_WORKS."""

    done: int
    """Number of bytes, or of samples under READING_ON and MEASURING, that are done."""

    total: int


@dataclass(frozen=True)
class Heartbeat:
    """Step and phase of a rank, and the time at which the phase began."""

    step: int
    phase: str
    when: float
    """Time of time.monotonic(), which all processes of a machine share."""

    work: LongWork | None = None
    """Work besides training that is under way, perhaps in a thread of its own."""


class HeartbeatWriter:
    """Writer of a rank's heartbeat file; `set_phase` costs about a microsecond."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        row = memoryview(self._map)  # an item is set without a call, which takes a third of the time of pack_into
        self._step_and_phase, self._when = row[:16].cast("q"), row[16:24].cast("d")
        self.step = 0
        self.on_phase: Callable[[str], None] | None = None
        """Function that is called with each new phase."""

        self.set_phase("start")

    def set_phase(self, phase: str) -> None:
        """Write that the rank begins a phase now, one of STEP_PHASES."""
        self._when[0] = _NOW()  # first: with the time of the one before, a new phase could count as hung
        self._step_and_phase[0] = self.step
        self._step_and_phase[1] = _PHASE_NUMBERS[phase]
        if self.on_phase is not None:
            self.on_phase(phase)

    def set_work(self, name: str, done: int = 0, total: int = 0) -> None:
        """Write how far a work has come, one of LONG_WORKS."""
        _WORK.pack_into(self._map, _ROW.size, LONG_WORKS.index(name), done, total)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return the last heartbeat in a file, or None if there is none yet."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < _ROW.size:
        return None
    step, phase, when = _ROW.unpack_from(raw)
    number, done, total = _WORK.unpack_from(raw, _ROW.size) if len(raw) >= _SIZE else (0, 0, 0)
    work = LongWork(LONG_WORKS[number], done, total) if number else None
    return Heartbeat(step, STEP_PHASES[phase], when, work) if when else None


_PHASE_IN_WORDS = {
    "start": "during set-up",
    "data": "while it read the data of step {}",
    "forward": "in the forward of step {}",
    "backward": "in the backward of step {}",
    "update": "in the update of step {}",
    "evaluate": "in the evaluation after step {}",
    "save": "while it saved the state after step {}",
    "between": "after step {}",
    "waiting": "after step {}",
    "end": "after step {}, the last one",
}


@dataclass(frozen=True)
class LastPhase:
    """Phase and step of a rank's last heartbeat; as text, such as "in the forward of step 2"."""

    phase: str
    step: int

    @classmethod
    def of(cls, run: Path, rank: int) -> LastPhase | None:
        """Return the last phase of a rank from the run folder, or None before the first heartbeat."""
        beat = read_heartbeat(heartbeat_path(run, rank))
        return None if beat is None else cls(beat.phase, beat.step)

    @override
    def __str__(self) -> str:
        return _PHASE_IN_WORDS[self.phase].format(self.step)


def with_own_clock(content: bytes, ahead: float) -> bytes:
    """Return a heartbeat file of another machine with this one's time: `ahead` seconds are added to its clock."""
    if len(content) < _ROW.size:
        return content
    step, phase, when = _ROW.unpack_from(content)
    return _ROW.pack(step, phase, when + ahead if when else 0.0) + content[_ROW.size :]
