"""`EventSource`: protocol of sources that record allocations and frees of one memory in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from unipar.backend import Category
from unipar.memory.account import DeviceMemory
from unipar.memory.sources.events import RankEvents


class EventSource(Protocol):
    """Source of allocation events: begun once, at the base; marked at every phase; ended once; then read."""

    method: str
    """Description of how blocks are recorded."""

    device: str
    """Device of the memory: cpu or cuda."""

    on: DeviceMemory | None
    """The GPU and its memory; known after `end`; None on the CPU."""

    def begin(self) -> None:
        """Set the base: memory that is allocated now is not counted."""
        ...

    def mark(self, phase: str) -> None:
        """Record that a phase begins."""
        ...

    def at(self) -> int:
        """Return the current position of this source, a count that never decreases."""
        ...

    def places(self, sites: Mapping[str, Category]) -> AbstractContextManager[Any]:
        """Context manager around a step in which each block's call site is recorded."""
        ...

    def end(self) -> None:
        """Stop recording for good."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of host memory that the source's own records take now."""
        ...

    def collect_events(self) -> RankEvents:
        """Return all events with marks and call sites; names of blocks are added by the caller."""
        ...

    def index(self, at: int) -> int:
        """Return how many events precede the position `at`; called after `end`."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the limits of what was recorded."""
        ...
