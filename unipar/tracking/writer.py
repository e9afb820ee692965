"""Writes to all trackers from threads; one that fails is left out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.tracking.tracker import find_tracker, require_tracker

TRACKER_TIMEOUT_SECONDS = 30.0
"""Seconds that a run waits for a tracker to begin, and to write what is left at the end."""


NoteEvent = Callable[..., None]


@final
class TrackerWriter:
    """Written by rank 0 alone; empty elsewhere. One that fails is left out, and said to be: the ledger has it all."""

    def __init__(
        self,
        to: tuple[str, ...],
        run: Path,
        rank: int,
        config: Mapping[str, Any] | None = None,
        note: NoteEvent | None = None,
    ) -> None:
        self._note = note
        wanted = dict.fromkeys(to) if rank == 0 else {}
        for name in wanted:
            require_tracker(name)
        self._scribes = [_TrackerThread(name, run, config or {}) for name in wanted]
        for scribe in self._scribes:
            scribe.begun.wait(TRACKER_TIMEOUT_SECONDS)
        self._look()

    def write(self, step: int, named: Mapping[str, float]) -> None:
        for scribe in self._scribes:
            scribe.pages.put((step, dict(named)))
        self._look()

    def close(self) -> None:
        for scribe in self._scribes:
            scribe.pages.put(None)
        for scribe in self._scribes:
            scribe.join(TRACKER_TIMEOUT_SECONDS)
            if scribe.is_alive():
                scribe.fault = f"had not written everything {TRACKER_TIMEOUT_SECONDS:g} s after the last step"
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
class _TrackerThread(threading.Thread):
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
            tracker = find_tracker(self.called)(self._run, self._config)
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
