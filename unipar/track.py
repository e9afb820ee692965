"""Where metrics go besides the run folder: trackers, ours found like anyone's, none of which can end a run."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, final

from typing_extensions import TypeIs, override

from unipar.errors import ConfigError
from unipar.points import PluginGroup

PATIENCE = 30.0
"""Seconds that a run waits for a tracker to begin, and to write what is left at the end."""


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


def names() -> list[str]:
    """Return the names of all trackers that are installed."""
    return TRACKERS.names()


@cache
def find(name: str) -> type[Tracker]:
    """Return the class by the name that `log.to` gives it; the libraries that it needs may be missing."""
    return TRACKERS.find(name)


def require(name: str) -> None:
    """Raise unless what the tracker needs is installed. Imports none of it."""
    tracker = find(name)
    TRACKERS.require(name, tracker.requires, tracker.hint)


Note = Callable[..., None]


@final
class Trackers:
    """Written by rank 0 alone; empty elsewhere. One that fails is left out, and said to be: the ledger has it all."""

    def __init__(
        self,
        to: tuple[str, ...],
        run: Path,
        rank: int,
        config: Mapping[str, Any] | None = None,
        note: Note | None = None,
    ) -> None:
        self._note = note
        wanted = dict.fromkeys(to) if rank == 0 else {}
        for name in wanted:
            require(name)
        self._scribes = [_Scribe(name, run, config or {}) for name in wanted]
        for scribe in self._scribes:
            scribe.begun.wait(PATIENCE)
        self._look()

    def write(self, step: int, named: Mapping[str, float]) -> None:
        for scribe in self._scribes:
            scribe.pages.put((step, dict(named)))
        self._look()

    def close(self) -> None:
        for scribe in self._scribes:
            scribe.pages.put(None)
        for scribe in self._scribes:
            scribe.join(PATIENCE)
            if scribe.is_alive():
                scribe.fault = f"had not written everything {PATIENCE:g} s after the last step"
        self._look()
        self._scribes = []

    def _look(self) -> None:
        for scribe in [scribe for scribe in self._scribes if scribe.fault]:
            self._scribes.remove(scribe)
            if self._note is not None:
                said = (
                    f"{scribe.called} {scribe.fault}; training goes on without it, and the run folder has every number"
                )
                self._note("tracker", said=said)


@final
class _Scribe(threading.Thread):
    """A tracker at work: a slow disk or network keeps it waiting, and not the training."""

    def __init__(self, called: str, run: Path, config: Mapping[str, Any]) -> None:
        super().__init__(name=f"tracker {called}", daemon=True)
        self.called, self._run, self._config = called, run, config
        self.pages: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self.begun = threading.Event()
        self.fault = ""
        self.start()

    @override
    def run(self) -> None:
        doing = "could not begin"
        try:
            tracker = find(self.called)(self._run, self._config)
            self.begun.set()
            doing = "could not write"
            while (page := self.pages.get()) is not None:
                tracker.write(*page)
            doing = "could not end"
            tracker.close()
        except Exception as e:  # whatever it is: numbers are lost in one place, and not the training
            first = (str(e).strip().splitlines() or [""])[0]
            self.fault = f"{doing} ({type(e).__name__}: {first})"
        finally:
            self.begun.set()
