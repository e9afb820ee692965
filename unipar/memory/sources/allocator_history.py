"""`AllocatorHistory`: source of events by the history that torch's allocator of a device keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
import torch

from unipar.backend import Category
from unipar.distributed.device import DeviceUnusable, allocator_segments, keeps_allocator_history, stream_number
from unipar.memory.account import DeviceMemory
from unipar.memory.sources.call_sites import find_call_site
from unipar.memory.sources.events import TENSOR, CallSite, EventArray, PhaseMark, PoolPeaks, RankEvents
from unipar.memory.sources.malloc_meter import NOTE_DTYPE
from unipar.memory.sources.nvml import query_bytes_used

MAX_HISTORY_ENTRIES: Final = 4_000_000
"""Number of history entries that torch keeps: about four for each block."""

BLOCK_BYTES: Final = 512
"""Unit of block sizes in torch's allocators of devices."""

UNSPLIT_REST_BYTES: Final = 2**20
"""Size above which a block may be up to this much larger than requested: torch splits off no smaller remainder."""


_NOTHING_YET: Final = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
"""Counters of an allocator that has allocated nothing."""


@dataclass(frozen=True, slots=True)
class SizeSnapshot:
    """True sizes of the blocks that are allocated after `at` events."""

    at: int
    sizes: Mapping[int, int]
    """Bytes of each block by its address."""


@final
class AllocatorHistory:
    """Source of events: blocks of torch's allocator on the device that this process uses."""

    method = "torch's allocator of the device, by its own history and statistics"
    on: DeviceMemory | None = None

    def __init__(self, device: torch.device) -> None:
        self.device, self._device = device.type, device
        self._torch: Any = torch.get_device_module(device)
        self._history: Any = self._torch.memory  # its functions for the history are documented, but private
        self._marks: list[PhaseMark] = []
        self._snapshots: list[SizeSnapshot] = []
        self._sites: Mapping[str, Category] = {}
        self._notes: list[str] = []

    def begin(self) -> None:
        """Start torch's history."""
        if not keeps_allocator_history(self._device):
            raise DeviceUnusable(f"the allocator of {self.device} keeps no history")
        self._index = self._torch.current_device()
        self._stream = stream_number(self._device)
        self._history._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_HISTORY_ENTRIES)
        self._first = 0
        self._first = self.at()
        self._torch.reset_peak_memory_stats(self._index)
        self._base = self._stats()["allocated_bytes"]["current"]
        self._take_snapshot()

    def mark(self, phase: str) -> None:
        stats = self._stats()  # all numbers from one call: other threads may free memory between two
        allocated = stats["allocated_bytes"]
        pool = PoolPeaks(*(stats[f"{kind}_bytes"]["peak"] for kind in ("reserved", "active", "requested")))
        self._marks.append(PhaseMark(self._came(stats), phase, allocated["peak"], allocated["current"], 0, pool))
        self._torch.reset_peak_memory_stats(self._index)
        self._take_snapshot()

    def at(self) -> int:
        """Return the number of allocations and frees since the base."""
        return self._came(self._stats())

    def places(self, sites: Mapping[str, Category]) -> nullcontext[None]:
        """Set the library's call sites; every entry of the history has its call stack already."""
        self._sites = sites
        return nullcontext()

    def end(self) -> None:
        self._count = self.at()
        traces = self._history._snapshot()["device_traces"]
        self._history._record_memory_history(None)
        self._trace: list[Mapping[str, Any]] = list(allocation_entries(traces[self._index]))
        if len(self._trace) < self._count:
            self._notes.append(f"torch kept only the last {len(self._trace)} of {self._count} events of its history")
        others = [i for i in range(self._torch.device_count()) if i != self._index and self._torch.memory_allocated(i)]
        if others:
            self._notes.append(f"memory on other devices ({', '.join(map(str, others))}) is not counted")
        bytes_used, why = self._bytes_used()
        if why:
            names = "CUDA and NCCL" if self.device == "cuda" else f"{self.device}'s driver and of its collectives"
            self._notes.append(f"memory of {names} was not measured: {why}")
        self.on = DeviceMemory(
            name=self._torch.get_device_name(self._index),
            reserved=self._torch.memory_reserved(self._index),
            used=bytes_used,
        )

    @property
    def bytes(self) -> int:
        """Zero: the size of torch's history is unknown, and it is not counted as records of the source."""
        return 0

    def collect_events(self) -> RankEvents:
        snapshots = [replace(snapshot, at=self.index(snapshot.at)) for snapshot in self._snapshots]
        marks = [replace(mark, at=self.index(mark.at)) for mark in self._marks]
        events = events_from_trace(self._trace, snapshots, marks, self._sites, base=self._base, stream=self._stream)
        if off := largest_drift(events):
            self._notes.append(f"the history and the allocator's own count differ by up to {off} bytes")
        return events

    def index(self, at: int) -> int:
        return max(0, at - (self._count - len(self._trace)))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def _bytes_used(self) -> tuple[int | None, str]:
        if self.device != "cuda":
            return None, "NVML is CUDA's"
        return query_bytes_used(f"GPU-{self._torch.get_device_properties(self._index).uuid}")

    def _came(self, stats: Mapping[str, Mapping[str, int]]) -> int:
        return stats["allocation"]["allocated"] + stats["allocation"]["freed"] - self._first

    def _stats(self) -> Mapping[str, Mapping[str, int]]:
        """Return the allocator's counters, summed over all pools; torch has none until the device's context is made."""
        stats = self._torch.memory_stats_as_nested_dict(self._index)
        kinds = ("allocation", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {kind: stats[kind]["all"] if stats else _NOTHING_YET for kind in kinds}

    def _take_snapshot(self) -> None:
        sizes = allocated_block_sizes(allocator_segments(self._device), self._index)
        self._snapshots.append(SizeSnapshot(self.at(), sizes))


def allocation_entries(trace: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Yield the entries of a trace that allocate a block or request its free."""
    return (entry for entry in trace if entry["action"] in ("alloc", "free_requested"))


def allocated_block_sizes(segments: Iterable[Mapping[str, Any]], device: int) -> dict[int, int]:
    """Return the true sizes of a snapshot's allocated blocks by address; the blocks of a segment are contiguous."""
    sizes: dict[int, int] = {}
    for segment in segments:
        if segment["device"] == device:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    sizes[address] = block["size"]
                address += block["size"]
    return sizes


def events_from_trace(
    trace: Sequence[Mapping[str, Any]],
    snapshots: Sequence[SizeSnapshot],
    marks: Sequence[PhaseMark],
    sites: Mapping[str, Category],
    *,
    base: int,
    stream: int,
) -> RankEvents:
    """Return the events of a trace; `marks` and `snapshots` are at numbers of its entries."""
    events, slack = replay_trace(trace, snapshots, base)
    return RankEvents(
        events=events,
        kinds=np.full(len(events), TENSOR, dtype=np.int8),
        owners=["torch"] * len(events),
        base=base,
        base_small=0,
        thread=stream,
        marks=list(marks),
        sites=list(call_sites_of_trace(trace, sites)),
        slack=slack,
    )


def replay_trace(
    trace: Sequence[Mapping[str, Any]], snapshots: Sequence[SizeSnapshot], base: int
) -> tuple[EventArray, list[int]]:
    """Return events in the meter's format, and the bytes by which the block of each may be larger.

    A trace has requested sizes. The true size is known for a block that is in a snapshot; for any other, it is the
    requested size rounded up, and a large block may be larger than that.
    """
    sizes, slack = [0] * len(trace), [0] * len(trace)
    open_at: dict[int, int] = {}
    older: dict[int, int] = {}
    left = list(snapshots)
    for i, entry in enumerate(trace):
        while left and left[0].at <= i:
            _apply_snapshot(left.pop(0), open_at, older, sizes, slack)
        address, size = entry["addr"], max(BLOCK_BYTES, -(-entry["size"] // BLOCK_BYTES) * BLOCK_BYTES)
        if entry["action"] == "alloc":
            open_at[address] = i
            sizes[i], slack[i] = size, UNSPLIT_REST_BYTES if size > UNSPLIT_REST_BYTES else 0
        elif (came := open_at.pop(address, None)) is not None:
            sizes[i] = -sizes[came]
        else:
            sizes[i] = -older.pop(address, size)
    for snapshot in left:
        _apply_snapshot(snapshot, open_at, older, sizes, slack)
    events = np.zeros(len(trace), dtype=NOTE_DTYPE)
    events["address"] = [entry["addr"] for entry in trace]
    events["size"] = sizes
    events["live"] = base + np.cumsum(events["size"])
    events["thread"] = [entry["stream"] for entry in trace]
    events["asked"] = [entry["size"] if entry["action"] == "alloc" else 0 for entry in trace]
    return events, slack


def _apply_snapshot(
    snapshot: SizeSnapshot, open_at: Mapping[int, int], older: dict[int, int], sizes: list[int], slack: list[int]
) -> None:
    for address, size in snapshot.sizes.items():
        if (i := open_at.get(address)) is None:
            older[address] = size
        else:
            sizes[i], slack[i] = size, 0


def largest_drift(events: RankEvents) -> int:
    """Return the largest difference at a mark, in bytes, between the replayed history and the allocator's counter."""
    live = [events.base, *events.events["live"].tolist()]
    return max((abs(live[mark.at] - mark.live) for mark in events.marks), default=0)


def call_sites_of_trace(trace: Sequence[Mapping[str, Any]], sites: Mapping[str, Category]) -> Iterable[CallSite]:
    """Yield the call site of each allocation; without Python frames, mostly in a backward, its place is empty."""
    for i, entry in enumerate(trace):
        if entry["action"] == "alloc":
            frames = ((f["filename"], f["name"], f["line"]) for f in entry.get("frames", ()))
            yield CallSite(i, i + 1, *find_call_site(frames, sites, ""))
