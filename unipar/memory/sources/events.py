"""Data of sources: allocation events, marks of phases, call sites, names of storages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from unipar.backend import Category
from unipar.memory.account import PhaseName

TENSOR, LIBRARY, RUNTIME = range(3)
"""Kinds of callers that allocate a block: torch for a tensor, another library, Python."""


LARGEST_BLOCKS: Final = 12
"""Number of blocks that are listed for a peak."""


MEMORY_PHASE_OF: Final[dict[str, PhaseName]] = {
    "start": "built",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "between": "steady",
}


EventArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class PoolPeaks:
    """Highest numbers of bytes since the last mark in further counters of torch's CUDA allocator."""

    reserved: int
    active: int
    requested: int


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """Start of a phase."""

    at: int
    """Number of events before the mark."""

    phase: str
    peak: int
    """Highest number of bytes allocated since the last mark."""

    live: int
    """Bytes allocated at the mark."""

    small: int
    """Bytes among them in blocks too small to be recorded."""

    pool: PoolPeaks | None = None
    when: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class NamedStorage:
    """Storage that an engine named after `at` events."""

    at: int
    address: int
    size: int
    category: Category
    name: str
    last_resort: bool = False
    """Whether the name counts only for a block of which nothing else is known."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Source line that was executed during the events `low` to `high`."""

    low: int
    high: int
    place: str
    category: Category | None


@dataclass
class RankEvents:
    """All recorded events of one rank, and facts about them."""

    events: EventArray
    """Events in the meter's format."""

    kinds: np.ndarray[Any, Any]
    """Kind of caller of each event: TENSOR, LIBRARY or RUNTIME."""

    owners: Sequence[str]
    """File whose code caused each event."""

    base: int
    base_small: int
    thread: int
    """Id of the thread that trains; on CUDA, of its stream."""

    shared: bool = False
    """Whether there are other ranks, so that other threads allocate for communication."""

    marks: list[PhaseMark] = field(default_factory=list[PhaseMark])
    named: list[NamedStorage] = field(default_factory=list[NamedStorage])
    sites: list[CallSite] = field(default_factory=list[CallSite])
    slack: Sequence[int] = ()
    """Bytes by which the block of each event may be larger than recorded; empty if all sizes are exact."""


def classify_callers(
    callers: Sequence[int], files: Sequence[tuple[int, int, str]]
) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Return the kind of caller of each event, and the name of the file that contains its code."""
    names: dict[int, str] = {}
    for caller in set(callers):
        path = next((path for low, high, path in files if low <= caller < high), "")
        names[caller] = path.rpartition("/")[2]
    owners = [names[caller] for caller in callers]
    return np.array([_kind_of_library(name) for name in owners], dtype=np.int8), owners


def _kind_of_library(name: str) -> int:
    if name.startswith("libc10") and not name.startswith("libc10_cuda"):  # libc10_cuda: records on the GPU's memory
        return TENSOR
    return RUNTIME if "python" in name else LIBRARY
