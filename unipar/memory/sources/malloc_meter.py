"""`MallocMeter`: source of events in a process that preloaded the malloc meter."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import get_native_id
from typing import Any, Final, final

import numpy as np

from unipar.backend import Category
from unipar.memory.account import DeviceMemory
from unipar.memory.sources.call_sites import CallSiteRecorder
from unipar.memory.sources.events import RUNTIME, CallSite, EventArray, PhaseMark, RankEvents, classify_callers

MAX_METER_NOTES: Final = 1 << 23
"""Largest number of records kept; address space is reserved for all, memory is used only as they are written."""

NOTE_DTYPE: Final = np.dtype(
    [(name, "i8") for name in ("address", "caller", "size", "live", "small", "thread", "asked")]
)
"""Format of a record of the meter, as in meter.c."""


@final
class MallocMeter:
    """Source of events: all blocks of malloc from 1 KiB on, recorded by a preloaded library."""

    method = "malloc, counted by a preloaded meter"
    device = "cpu"
    on: DeviceMemory | None = None

    def __init__(self) -> None:
        assert self.here(), "the meter was not preloaded"
        self._lib = ctypes.CDLL(None)
        for name, result in (("live", "q"), ("small", "q"), ("noted", "q"), ("peak", "q"), ("note", "Q")):
            getattr(self._lib, f"unipar_meter_{name}").restype = {"q": ctypes.c_int64, "Q": ctypes.c_uint64}[result]
        self._lib.unipar_meter_note.argtypes = [ctypes.c_int64]
        self._marks: list[PhaseMark] = []
        self._sites: list[CallSite] = []
        self._low = 0
        """Index of the first record that is not folded."""

        self._alive = np.empty(0, dtype=NOTE_DTYPE)
        """Folded records: those of blocks that were still allocated."""

        self._read = np.empty(0, dtype=bool)
        """Whether each folded record was made while data were read."""

        self._lost = False

    @staticmethod
    def here() -> bool:
        """Return whether this process preloaded the meter."""
        return hasattr(ctypes.CDLL(None), "unipar_meter_live")

    def begin(self) -> None:
        """Start to record blocks."""
        os.environ.pop("LD_PRELOAD", None)  # processes that this one starts are not measured
        self._small = self._lib.unipar_meter_small()
        self._notes = self._lib.unipar_meter_note(MAX_METER_NOTES)
        if not self._notes:
            raise MemoryError("no address space left for the meter's records")
        os.register_at_fork(after_in_child=self._lib.unipar_meter_end)  # data workers are not measured
        self._lib.unipar_meter_peak()
        self._base = self._lib.unipar_meter_live()

    def mark(self, phase: str) -> None:
        lib = self._lib
        mark = PhaseMark(self.at(), phase, lib.unipar_meter_peak(), lib.unipar_meter_live(), lib.unipar_meter_small())
        self._marks.append(mark)

    def at(self) -> int:
        """Return the number of records until now."""
        return self._lib.unipar_meter_noted()

    def places(self, sites: Mapping[str, Category]) -> CallSiteRecorder:
        return CallSiteRecorder(self.at, self._sites, sites)

    def end(self) -> None:
        self._lib.unipar_meter_end()

    @property
    def bytes(self) -> int:
        return min(self.at(), MAX_METER_NOTES) * NOTE_DTYPE.itemsize

    def collect_events(self) -> RankEvents:
        events = self._events()
        kinds, owners = classify_callers(events["caller"].tolist(), list_code_ranges())
        kinds[: len(self._read)][self._read] = RUNTIME
        return RankEvents(
            events=events,
            kinds=kinds,
            owners=owners,
            base=self._base,
            base_small=self._small,
            thread=get_native_id(),
            marks=[replace(mark, at=self.index(mark.at)) for mark in self._marks],
            sites=[replace(site, low=self.index(site.low), high=self.index(site.high)) for site in self._sites],
        )

    def index(self, at: int) -> int:
        return max(0, at - self._low + len(self._alive))

    def _events(self) -> EventArray:
        """Return the folded records, as if they came first, and all records since."""
        high = self.at()
        self._lost = self._lost or high - self._low > MAX_METER_NOTES
        self._low = max(self._low, high - MAX_METER_NOTES)
        raw: Any = (ctypes.c_char * (MAX_METER_NOTES * NOTE_DTYPE.itemsize)).from_address(self._notes)
        since = np.frombuffer(raw, dtype=NOTE_DTYPE)[np.arange(self._low, high) % MAX_METER_NOTES]
        return np.concatenate([self._alive, since])

    def fold(self) -> None:
        """Keep only the records of blocks that are still allocated, so that a long run needs no more room."""
        high = self.at()
        events = self._events()[: self.index(high)]
        read = np.zeros(len(events), dtype=bool)
        read[: len(self._read)] = self._read
        for mark, after in pairwise(self._marks):
            read[self.index(mark.at) : self.index(after.at)] |= mark.phase == "data"
        alive, gone = find_live_blocks(events)
        self._small += gone
        self._alive, self._read, self._low = events[alive], read[alive], high
        self._marks, self._sites = self._marks[:0], self._sites[:0]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"more than {MAX_METER_NOTES} allocations and frees: the first ones are lost",) if self._lost else ()


def find_live_blocks(events: EventArray) -> tuple[np.ndarray[Any, Any], int]:
    """Return the indices of allocations that were not freed, and the bytes freed that no event allocated."""
    order = np.argsort(events["address"], kind="stable")
    address, size = events["address"][order], events["size"][order]
    other = address[1:] != address[:-1]
    first, last = np.append(True, other)[: len(order)], np.append(other, True)[: len(order)]
    alive = np.sort(order[last & (size > 0)])
    return alive, -int(size[first & (size < 0)].sum())


def list_code_ranges() -> list[tuple[int, int, str]]:
    """Return the address ranges of code in this process: (first, end, path of the file)."""
    ranges: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        words = line.split(maxsplit=5)
        if "x" in words[1] and len(words) == 6:
            low, _, high = words[0].partition("-")
            ranges.append((int(low, 16), int(high, 16), words[5]))
    return ranges
