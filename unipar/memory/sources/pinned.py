"""Pinned host memory, which torch allocates through the device's driver and not through malloc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from unipar.backend import Category, Holding
from unipar.memory.account import NamedBlock, PhaseName, PhasePeak
from unipar.memory.sources.events import LARGEST_BLOCKS, MEMORY_PHASE_OF


@dataclass(frozen=True, slots=True)
class PinnedMark:
    """Start of a phase."""

    phase: str
    active: int
    """Highest number of bytes in use since the last mark."""

    owned: int
    """Highest number of bytes that the allocator took from the system since the last mark."""

    named: dict[int, NamedBlock] = field(default_factory=dict[int, NamedBlock])
    """Blocks that engines named at this mark, by address."""


@final
class PinnedMemory:
    """Recorder of pinned host memory by the statistics of torch's allocator, which keeps no history of blocks."""

    def __init__(self, device: str) -> None:
        self._torch: Any = torch.get_device_module(device)
        self._marks: list[PinnedMark] = []

    @staticmethod
    def is_counted(device: str) -> bool:
        """Return whether a device's library counts the host memory that it has pinned; that of xpu does not."""
        return hasattr(torch.get_device_module(device), "host_memory_stats")

    def mark(self, phase: str) -> None:
        """Record that a phase begins, with the peaks since the last mark."""
        stats = self._torch.host_memory_stats()
        self._marks.append(PinnedMark(phase, stats.get("active_bytes.peak", 0), stats.get("allocated_bytes.peak", 0)))
        self._torch.reset_peak_host_memory_stats()

    def name(self, storage: torch.UntypedStorage, holding: Holding) -> None:
        """Record the name of a storage at the last mark."""
        block = NamedBlock(category=holding.category, name=holding.name, size=storage.nbytes())
        self._marks[-1].named.setdefault(storage.data_ptr(), block)

    def phases(self, low: int, high: int) -> tuple[PhasePeak, ...]:
        """Return the peak of each phase among the windows `low` to `high`; a window goes from its mark to the next."""
        peaks: dict[PhaseName, PhasePeak] = {}
        for mark, after in zip(self._marks[low:high], self._marks[low + 1 : high + 1], strict=True):
            if (name := MEMORY_PHASE_OF.get(mark.phase)) is not None:
                phase = pinned_phase(name, after.active, after.owned, mark.named | after.named)
                if name not in peaks or phase.peak > peaks[name].peak:
                    peaks[name] = phase
        return tuple(peaks.values())


def pinned_phase(name: PhaseName, active: int, owned: int, named: Mapping[int, NamedBlock]) -> PhasePeak:
    """Return a phase's peak by category; "runtime" is rounding to powers of two, and memory kept for reuse."""
    active = min(active, owned)  # torch before 2.13 does not subtract what is given back
    held: dict[Category, int] = {}
    for block in named.values():
        held[block.category] = held.get(block.category, 0) + block.size
    rounded = sum((1 << (block.size - 1).bit_length()) - block.size for block in named.values())
    held["runtime"] = min(rounded, max(0, active - sum(held.values()))) + owned - active
    held["unattributed"] = owned - sum(held.values())
    largest = sorted(named.values(), key=lambda b: -b.size)[:LARGEST_BLOCKS]
    held = {category: size for category, size in held.items() if size}
    return PhasePeak(name=name, peak=owned, held=held, largest=tuple(largest))
