"""Writing of metrics to all trackers, each in a thread; a tracker that fails is dropped."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from unipar.tracking.images import save_image
from unipar.tracking.tracker import Tracker, find_tracker, require_tracker

TRACKER_TIMEOUT_SECONDS = 30.0
"""Seconds that a run waits for a tracker to start, and to write its remaining metrics at the end."""

if TYPE_CHECKING:
    from torch import Tensor

NoteEvent = Callable[..., None]
"""Function that writes an event to the run log: `RunLog.note`."""


@final
class TrackerWriter:
    """Writer to all trackers of a run, on rank 0 only; other ranks have no trackers.

    A tracker that fails is dropped, and the failure is noted in the run log, which holds all metrics.
    """

    def __init__(
        self,
        to: tuple[str, ...],
        run: Path,
        rank: int,
        config: Mapping[str, Any] | None = None,
        note: NoteEvent | None = None,
        *,
        after: int | None = None,
    ) -> None:
        """`after`: step after which the run goes on in the folder of an earlier attempt; None: it is the first one."""
        self._note = note
        self._images = run / "images" if rank == 0 else None
        wanted = dict.fromkeys(to) if rank == 0 else {}
        for name in wanted:
            require_tracker(name)
        self._threads = [_TrackerThread(name, run, config or {}, after) for name in wanted]
        for thread in self._threads:
            thread.ready.wait(TRACKER_TIMEOUT_SECONDS)
            if thread.remark and note is not None:
                note("tracker", said=thread.remark)
        self._drop_failed()

    def write(self, step: int, named: Mapping[str, float]) -> None:
        """Queue the metrics of one step for all trackers."""
        for thread in self._threads:
            thread.rows.put((step, dict(named)))
        self._drop_failed()

    def keep_image(self, step: int, name: str, pixels: Tensor) -> Path | None:
        """Write an image into the run folder, queue it for all trackers, and return its file; None on other ranks."""
        if self._images is None:
            return None
        file = save_image(self._images, step, name, pixels)
        for thread in self._threads:
            thread.rows.put((step, (name, file)))
        self._drop_failed()
        return file

    def close(self) -> None:
        """Wait until all trackers have written everything, or dropped out."""
        for thread in self._threads:
            thread.rows.put(None)
        for thread in self._threads:
            thread.join(TRACKER_TIMEOUT_SECONDS)
            if thread.is_alive():
                thread.fault = f"had not written everything {TRACKER_TIMEOUT_SECONDS:g} s after the last step"
        self._drop_failed()
        self._threads = []

    def _drop_failed(self) -> None:
        """Remove the trackers that have failed, and note why in the run log."""
        for thread in [thread for thread in self._threads if thread.fault]:
            self._threads.remove(thread)
            if self._note is not None:
                sentence = (
                    f"{thread.tracker_name} {thread.fault}; "
                    "training continues without it, and the run folder has all metrics"
                )
                self._note("tracker", said=sentence)


@final
class _TrackerThread(threading.Thread):
    """Thread of one tracker, so that a slow disk or network does not delay the training."""

    def __init__(self, tracker_name: str, run: Path, config: Mapping[str, Any], after: int | None) -> None:
        super().__init__(name=f"tracker {tracker_name}", daemon=True)
        self.tracker_name, self._run, self._config, self._after = tracker_name, run, config, after
        self.rows: queue.SimpleQueue[tuple[int, dict[str, float] | tuple[str, Path]] | None] = queue.SimpleQueue()
        self.ready = threading.Event()
        self.fault = self.remark = ""
        self.start()

    @override
    def run(self) -> None:
        problem = "could not start"
        try:
            kind = find_tracker(self.tracker_name)
            tracker = kind(self._run, self._config)
            if self._after is not None:
                tracker.go_on(self._after)
                if kind.go_on is Tracker.go_on:
                    self.remark = f"{self.tracker_name} may show steps after {self._after} twice: it has no go_on()"
            self.ready.set()
            problem = "could not write"
            while (row := self.rows.get()) is not None:
                step, content = row
                if isinstance(content, dict):
                    tracker.write(step, content)
                else:
                    tracker.write_image(step, f"log/{content[0]}", content[1])
            problem = "could not close"
            tracker.close()
        except Exception as e:  # any failure of a tracker must not end the training
            first = (str(e).strip().splitlines() or [""])[0]
            self.fault = f"{problem} ({type(e).__name__}: {first})"
        finally:
            self.ready.set()
