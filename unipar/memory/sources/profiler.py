"""`ProfilerSource`: source of events where no meter can be compiled, by the records of torch's profiler."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch._C._profiler import _EventType, _RecordFunctionFast  # pyright: ignore[reportPrivateUsage] - no public way
from torch.profiler import ProfilerActivity, profile

from unipar.backend import Category
from unipar.memory.account import DeviceMemory
from unipar.memory.sources.call_sites import CallSiteRecorder
from unipar.memory.sources.events import TENSOR, CallSite, PhaseMark, RankEvents
from unipar.memory.sources.gaps import BlockChange, bytes_before, fill_gaps
from unipar.memory.sources.malloc_meter import NOTE_DTYPE

_LIBRARY: Final = Path(torch.__file__).parent / "lib" / "libc10.so"
_COUNT_ALL_THREADS: Final = "FLAGS_caffe2_report_cpu_memory_usage"
"""Flag in torch's library: whether the allocator's counter covers all threads, and not only profiled ones."""

_MARKER_RANGE: Final = "unipar is here"
"""Name of an empty profiler range that marks a position among the events."""


@final
class ProfilerSource:
    """Source of events: blocks of torch's tensors only."""

    method = "torch's own allocator, by a profiler's events"
    device = "cpu"
    on: DeviceMemory | None = None
    bytes = 0
    notes = (
        "only torch's tensors were recorded, not what gloo, MKL or Python allocate for themselves",
        "resident memory includes the profiler's own records",
    )

    def __init__(self) -> None:
        self._counts = ctypes.c_bool.in_dll(ctypes.CDLL(str(_LIBRARY)), _COUNT_ALL_THREADS)
        self._now = 0
        self._phases: list[tuple[int, str, float]] = []
        self._sites: list[CallSite] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def begin(self) -> None:
        self._counts.value = True
        with warnings.catch_warnings():
            # of torch below 2.12, at every start: it concerns profiles of several cycles
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            self._profile.__enter__()

    def mark(self, phase: str) -> None:
        self._phases.append((self.at(), phase, time.perf_counter()))

    def at(self) -> int:
        with _RecordFunctionFast(_MARKER_RANGE):
            self._now += 1
        return self._now

    def places(self, sites: Mapping[str, Category]) -> CallSiteRecorder:
        return CallSiteRecorder(self.at, self._sites, sites)

    def end(self) -> None:
        self._profile.__exit__(None, None, None)
        self._counts.value = False

    def collect_events(self) -> RankEvents:
        block_changes: list[BlockChange] = []
        markers = [0]
        thread = 0
        for event in sorted(self._events(), key=lambda event: event.start_time_ns):
            if event.tag == _EventType.Allocation:
                block = event.typed[1]
                block_changes.append(BlockChange(block.ptr, block.alloc_size, block.total_allocated, event.start_tid))
            else:
                markers.append(len(block_changes))
                thread = event.start_tid
        assert len(markers) == self._now + 1, "the profiler lost a range"
        changes, places = fill_gaps(block_changes)
        self._indices = [places[marker] for marker in markers]
        rows = [(c.address, 0, c.size, c.live, 0, c.thread, max(c.size, 0)) for c in changes]
        events = np.array(rows, dtype=NOTE_DTYPE)
        return RankEvents(
            events=events,
            kinds=np.full(len(rows), TENSOR, dtype=np.int8),
            owners=[""] * len(rows),
            base=bytes_before(block_changes),
            base_small=0,
            thread=thread,
            marks=self._marks([bytes_before(block_changes), *events["live"].tolist()]),
            sites=[CallSite(self.index(s.low), self.index(s.high), s.place, s.category) for s in self._sites],
        )

    def index(self, at: int) -> int:
        return self._indices[at]

    def _events(self) -> Iterator[Any]:
        """Yield the profiler's events of blocks on the CPU, and of marker ranges."""
        left = list[Any](self._profile.profiler.kineto_results.experimental_event_tree())  # pyright: ignore[reportOptionalMemberAccess]
        while left:
            event = left.pop()
            left.extend(event.children)
            if event.tag == _EventType.Allocation:
                if event.typed[1].device.type == "cpu":
                    yield event
            elif event.name == _MARKER_RANGE:
                yield event

    def _marks(self, live: list[int]) -> list[PhaseMark]:
        """Return the marks; `live` is the allocator's counter before the first event and after each."""
        ats = [self.index(at) for at, *_ in self._phases]
        peaks = [live[0], *(max(live[a : b + 1]) for a, b in pairwise(ats))]
        return [
            PhaseMark(at, phase, peak, live[at], 0, when=when)
            for at, (_, phase, when), peak in zip(ats, self._phases, peaks, strict=True)
        ]
