"""What watching needs of a source of events: it sees the blocks of one memory come and go in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from unipar.backend import Category
from unipar.memory.account import DeviceMemory
from unipar.memory.sources.events import SeenEvents


class EventSource(Protocol):
    """Begun once, at the base; marked at every phase; ended once; then asked for what it saw."""

    method: str
    """How it sees blocks, in words."""

    device: str
    """Whose memory: cpu or cuda."""

    on: DeviceMemory | None
    """The GPU whose memory it is; known once it has ended."""

    def begin(self) -> None:
        """The base: what is allocated now is not counted."""
        ...

    def mark(self, phase: str) -> None:
        """A phase begins."""
        ...

    def at(self) -> int:
        """Now, as this source counts: events or time, and never less than before."""
        ...

    def places(self, sites: Mapping[str, Category]) -> AbstractContextManager[Any]:
        """Around a step whose blocks are to be told by the line that asked for them."""
        ...

    def end(self) -> None:
        """Nothing is counted any more, for good."""
        ...

    @property
    def bytes(self) -> int:
        """Of its own notes in the host's memory, as they are now."""
        ...

    def collect_events(self) -> SeenEvents:
        """All events, by their number: of marks and sites too. Only what others named is not in it."""
        ...

    def index(self, at: int) -> int:
        """How many events had come when `at()` said this; asked once it has ended."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the account has to know of it."""
        ...
