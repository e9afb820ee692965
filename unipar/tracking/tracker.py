"""`Tracker`: the contract; finding one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import TypeIs

from unipar.errors import ConfigError
from unipar.utils.entry_points import PluginGroup


class Tracker(ABC):
    """Subclass it and name the class in the entry-point group `unipar.trackers`; rank 0 makes one, in a thread."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that must be importable; import them in `__init__`."""

    hint: ClassVar[str] = ""
    """What to type when they are not."""

    @abstractmethod
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        """Begin: `run` is the run's folder, `config` all of its keys as plain values."""

    @abstractmethod
    def write(self, step: int, named: Mapping[str, float]) -> None:
        """Numbers by name, of one step."""

    @abstractmethod
    def close(self) -> None:
        """Nothing follows; what is not yet written is written now."""


def _is_tracker(plugin: object) -> TypeIs[type[Tracker]]:
    return isinstance(plugin, type) and issubclass(plugin, Tracker)


TRACKERS = PluginGroup(
    "unipar.trackers", "tracker", "log.to: {}", "a subclass of unipar.Tracker", _is_tracker, ConfigError
)


def tracker_names() -> list[str]:
    """Return the names of all trackers that are installed."""
    return TRACKERS.names()


@cache
def find_tracker(name: str) -> type[Tracker]:
    """Return the class by the name that `log.to` gives it; the libraries that it needs may be missing."""
    return TRACKERS.find(name)


def require_tracker(name: str) -> None:
    """Raise unless what the tracker needs is installed. Imports none of it."""
    tracker = find_tracker(name)
    TRACKERS.require(name, tracker.requires, tracker.hint)
