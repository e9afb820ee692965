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


LARGEST: Final = 12


NAMES: Final[dict[str, PhaseName]] = {
    "start": "built",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "between": "steady",
}


Events = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Pool:
    """What CUDA's allocator counts beside what is allocated: the most since the last mark, in bytes."""

    reserved: int
    active: int
    requested: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a phase begins."""

    at: int
    """How many blocks came and went before."""

    phase: str
    peak: int
    """The most that was allocated since the last mark."""

    live: int
    """What is allocated now, and how much of it in blocks too small to be noted."""

    small: int
    pool: Pool | None = None
    when: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Named:
    """A storage that somebody named when `at` blocks had come and gone."""

    at: int
    address: int
    size: int
    category: Category
    name: str


@dataclass(frozen=True, slots=True)
class Site:
    """Who was at work while blocks from `low` to `high` came and went."""

    low: int
    high: int
    place: str
    category: Category | None


@dataclass
class Seen:
    """All that was seen of one rank: what came and went, and what is known about it."""

    events: Events
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

    marks: list[Mark] = field(default_factory=list[Mark])
    named: list[Named] = field(default_factory=list[Named])
    sites: list[Site] = field(default_factory=list[Site])
    slack: Sequence[int] = ()
    """Of each event by how much the block may be larger than is known; empty where all sizes are exact."""


def askers(callers: Sequence[int], files: Sequence[tuple[int, int, str]]) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Who asked for each block, and by which file's code."""
    names: dict[int, str] = {}
    for caller in set(callers):
        path = next((path for low, high, path in files if low <= caller < high), "")
        names[caller] = path.rpartition("/")[2]
    owners = [names[caller] for caller in callers]
    return np.array([_kind(name) for name in owners], dtype=np.int8), owners


def _kind(name: str) -> int:
    if name.startswith("libc10") and not name.startswith("libc10_cuda"):  # that keeps books on the device's memory
        return TENSOR
    return RUNTIME if "python" in name else LIBRARY
