"""Blocks of CUDA's memory, as torch's allocator remembers them: a source of events. It has never run on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
import torch

from unipar.backend import Category
from unipar.memory.account import DeviceMemory
from unipar.memory.sources.call_sites import find_call_site
from unipar.memory.sources.events import TENSOR, CallSite, EventArray, PhaseMark, PoolPeaks, SeenEvents
from unipar.memory.sources.malloc import NOTE_DTYPE
from unipar.memory.sources.nvml import query_bytes_used

MAX_HISTORY_ENTRIES: Final = 4_000_000
"""Entries that torch keeps: four or so for each block."""

CUDA_BLOCK_BYTES: Final = 512
"""torch's allocator gives multiples of this."""

UNSPLIT_REST_BYTES: Final = 2**20
"""Blocks above this may be larger by as much as this than what was asked for: torch splits off no smaller rest."""


_TORCH_MEMORY: Any = torch.cuda.memory  # what remembers is not public in torch, though documented there


@dataclass(frozen=True, slots=True)
class SizeSnapshot:
    """The true sizes of the blocks that are there when `at` events have come."""

    at: int
    sizes: Mapping[int, int]
    """By address."""


@final
class CudaHistory:
    """Of the device that this process uses."""

    method = "torch's CUDA allocator, by its own history and statistics"
    device = "cuda"
    on: DeviceMemory | None = None

    def __init__(self) -> None:
        self._marks: list[PhaseMark] = []
        self._looks: list[SizeSnapshot] = []
        self._sites: Mapping[str, Category] = {}
        self._notes: list[str] = []

    def begin(self) -> None:
        """From here on torch remembers."""
        self._index = torch.cuda.current_device()
        self._stream = torch.cuda.current_stream().cuda_stream
        _TORCH_MEMORY._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_HISTORY_ENTRIES)
        self._first = 0
        self._first = self.at()
        torch.cuda.reset_peak_memory_stats(self._index)
        self._base = self._stats()["allocated_bytes"]["current"]
        self._look()

    def mark(self, phase: str) -> None:
        stats = self._stats()  # at one instant: other threads may free
        allocated = stats["allocated_bytes"]
        pool = PoolPeaks(*(stats[f"{kind}_bytes"]["peak"] for kind in ("reserved", "active", "requested")))
        self._marks.append(PhaseMark(self._came(stats), phase, allocated["peak"], allocated["current"], 0, pool))
        torch.cuda.reset_peak_memory_stats(self._index)
        self._look()

    def at(self) -> int:
        """How many blocks came and went since the base."""
        return self._came(self._stats())

    def places(self, sites: Mapping[str, Category]) -> nullcontext[None]:
        """Nothing to do: each entry has the lines that asked."""
        self._sites = sites
        return nullcontext()

    def end(self) -> None:
        self._count = self.at()
        traces = _TORCH_MEMORY._snapshot()["device_traces"]
        _TORCH_MEMORY._record_memory_history(None)
        self._trace: list[Mapping[str, Any]] = list(allocation_entries(traces[self._index]))
        if len(self._trace) < self._count:
            self._notes.append(f"torch kept {len(self._trace)} of {self._count} events of its history, the last ones")
        others = [i for i in range(torch.cuda.device_count()) if i != self._index and torch.cuda.memory_allocated(i)]
        if others:
            self._notes.append(f"what lies on other devices ({', '.join(map(str, others))}) is not in it")
        bytes_used, why = query_bytes_used(f"GPU-{torch.cuda.get_device_properties(self._index).uuid}")
        if why:
            self._notes.append(f"what CUDA and NCCL take was not measured: {why}")
        self.on = DeviceMemory(
            name=torch.cuda.get_device_name(self._index),
            reserved=torch.cuda.memory_reserved(self._index),
            used=bytes_used,
        )

    @property
    def bytes(self) -> int:
        """Unknown: torch keeps them. They do not count as notes of ours."""
        return 0

    def collect_events(self) -> SeenEvents:
        looks = [replace(look, at=self.index(look.at)) for look in self._looks]
        marks = [replace(mark, at=self.index(mark.at)) for mark in self._marks]
        seen = events_from_trace(self._trace, looks, marks, self._sites, base=self._base, stream=self._stream)
        if off := largest_drift(seen):
            self._notes.append(f"the history and the allocator's own count differ by up to {off} bytes")
        return seen

    def index(self, at: int) -> int:
        return max(0, at - (self._count - len(self._trace)))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def _came(self, stats: Mapping[str, Mapping[str, int]]) -> int:
        return stats["allocation"]["allocated"] + stats["allocation"]["freed"] - self._first

    def _stats(self) -> Mapping[str, Mapping[str, int]]:
        """Of all pools together."""
        told = torch.cuda.memory_stats_as_nested_dict(self._index)
        kinds = ("allocation", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {kind: told[kind]["all"] for kind in kinds}

    def _look(self) -> None:
        segments = torch.cuda.memory_snapshot(include_traces=False)
        self._looks.append(SizeSnapshot(self.at(), allocated_block_sizes(segments, self._index)))


def allocation_entries(trace: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Of a trace's entries those that change what is allocated: a block is given, or no longer wanted."""
    return (entry for entry in trace if entry["action"] in ("alloc", "free_requested"))


def allocated_block_sizes(segments: Iterable[Mapping[str, Any]], device: int) -> dict[int, int]:
    """The allocated blocks of a snapshot: their true sizes by address. A segment's blocks lie one after another."""
    found: dict[int, int] = {}
    for segment in segments:
        if segment["device"] == device:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found[address] = block["size"]
                address += block["size"]
    return found


def events_from_trace(
    trace: Sequence[Mapping[str, Any]],
    looks: Sequence[SizeSnapshot],
    marks: Sequence[PhaseMark],
    sites: Mapping[str, Category],
    *,
    base: int,
    stream: int,
) -> SeenEvents:
    """All that a trace tells, whose marks and looks count its entries."""
    events, slack = replay_trace(trace, looks, base)
    return SeenEvents(
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
    trace: Sequence[Mapping[str, Any]], looks: Sequence[SizeSnapshot], base: int
) -> tuple[EventArray, list[int]]:
    """Events as the meter notes them; of each block by how much it may be larger than that.

    A trace has the sizes that were asked for. The true one is known of a block that was there at a look; of another it
    is that, rounded up, and a large block may have been given whole.
    """
    sizes, slack = [0] * len(trace), [0] * len(trace)
    open_at: dict[int, int] = {}
    older: dict[int, int] = {}
    left = list(looks)
    for i, entry in enumerate(trace):
        while left and left[0].at <= i:
            _apply_snapshot(left.pop(0), open_at, older, sizes, slack)
        address, size = entry["addr"], max(CUDA_BLOCK_BYTES, -(-entry["size"] // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES)
        if entry["action"] == "alloc":
            open_at[address] = i
            sizes[i], slack[i] = size, UNSPLIT_REST_BYTES if size > UNSPLIT_REST_BYTES else 0
        elif (came := open_at.pop(address, None)) is not None:
            sizes[i] = -sizes[came]
        else:
            sizes[i] = -older.pop(address, size)
    for look in left:
        _apply_snapshot(look, open_at, older, sizes, slack)
    events = np.zeros(len(trace), dtype=NOTE_DTYPE)
    events["address"] = [entry["addr"] for entry in trace]
    events["size"] = sizes
    events["live"] = base + np.cumsum(events["size"])
    events["thread"] = [entry["stream"] for entry in trace]
    events["asked"] = [entry["size"] if entry["action"] == "alloc" else 0 for entry in trace]
    return events, slack


def _apply_snapshot(
    look: SizeSnapshot, open_at: Mapping[int, int], older: dict[int, int], sizes: list[int], slack: list[int]
) -> None:
    for address, size in look.sizes.items():
        if (i := open_at.get(address)) is None:
            older[address] = size
        else:
            sizes[i], slack[i] = size, 0


def largest_drift(seen: SeenEvents) -> int:
    """How far replay and the allocator's own count of what is allocated are apart, at most, at the marks."""
    live = [seen.base, *seen.events["live"].tolist()]
    return max((abs(live[mark.at] - mark.live) for mark in seen.marks), default=0)


def call_sites_of_trace(trace: Sequence[Mapping[str, Any]], sites: Mapping[str, Category]) -> Iterable[CallSite]:
    """The line that asked for each block; where Python was not there, for a backward above all, there is none."""
    for i, entry in enumerate(trace):
        if entry["action"] == "alloc":
            frames = ((f["filename"], f["name"], f["line"]) for f in entry.get("frames", ()))
            yield CallSite(i, i + 1, *find_call_site(frames, sites, ""))
