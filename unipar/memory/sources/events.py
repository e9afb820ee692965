"""Blocks, marks and sites as sources note them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from unipar.backend import Category
from unipar.memory.account import PhaseName

TENSOR, LIBRARY, RUNTIME = range(3)
"""Who asked for a block: torch for a tensor, another library, or Python."""


LARGEST_BLOCKS: Final = 12


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
    """What CUDA's allocator counts beside what is allocated: the most since the last mark, in bytes."""

    reserved: int
    active: int
    requested: int


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """Where a phase begins."""

    at: int
    """How many blocks came and went before."""

    phase: str
    peak: int
    """The most that was allocated since the last mark."""

    live: int
    """What is allocated now, and how much of it in blocks too small to be noted."""

    small: int
    pool: PoolPeaks | None = None
    when: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class NamedStorage:
    """A storage that somebody named when `at` blocks had come and gone."""

    at: int
    address: int
    size: int
    category: Category
    name: str


@dataclass(frozen=True, slots=True)
class CallSite:
    """Who was at work while blocks from `low` to `high` came and went."""

    low: int
    high: int
    place: str
    category: Category | None


@dataclass
class SeenEvents:
    """All that was seen of one rank: what came and went, and what is known about it."""

    events: EventArray
    """As the meter notes them."""

    kinds: np.ndarray[Any, Any]
    """Of each event, who asked."""

    owners: Sequence[str]
    """Of each event, the file whose code asked."""

    base: int
    base_small: int
    thread: int
    """The one that trains."""

    shared: bool = False
    """Whether there are other ranks: what other threads allocate is for them."""

    marks: list[PhaseMark] = field(default_factory=list[PhaseMark])
    named: list[NamedStorage] = field(default_factory=list[NamedStorage])
    sites: list[CallSite] = field(default_factory=list[CallSite])
    slack: Sequence[int] = ()
    """Of each event by how much the block may be larger than is known; empty where all sizes are exact."""


def classify_callers(
    callers: Sequence[int], files: Sequence[tuple[int, int, str]]
) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Who asked for each block, and by which file's code."""
    names: dict[int, str] = {}
    for caller in set(callers):
        path = next((path for low, high, path in files if low <= caller < high), "")
        names[caller] = path.rpartition("/")[2]
    owners = [names[caller] for caller in callers]
    return np.array([_kind_of_library(name) for name in owners], dtype=np.int8), owners


def _kind_of_library(name: str) -> int:
    if name.startswith("libc10") and not name.startswith("libc10_cuda"):  # that keeps books on the device's memory
        return TENSOR
    return RUNTIME if "python" in name else LIBRARY
