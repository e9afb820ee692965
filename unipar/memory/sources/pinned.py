"""The host's pages that CUDA pins: torch has an allocator of its own for them, and malloc does not see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from unipar.backend import Category, Holding
from unipar.memory.account import NamedBlock, PhaseName, PhasePeak
from unipar.memory.sources.events import LARGEST_BLOCKS, MEMORY_PHASE_OF


@dataclass(frozen=True, slots=True)
class PinnedMark:
    """Where a phase begins."""

    phase: str
    active: int
    """The most since the last mark that somebody had."""

    owned: int
    """The most since then that the allocator had of the system."""

    named: dict[int, NamedBlock] = field(default_factory=dict[int, NamedBlock])
    """What was named there, by address."""


@final
class PinnedMemory:
    """By the statistics of torch's allocator: no history tells of single blocks."""

    def __init__(self) -> None:
        self._marks: list[PinnedMark] = []

    def mark(self, phase: str) -> None:
        stats = torch.cuda.host_memory_stats()
        self._marks.append(PinnedMark(phase, stats.get("active_bytes.peak", 0), stats.get("allocated_bytes.peak", 0)))
        torch.cuda.reset_peak_host_memory_stats()

    def name(self, storage: torch.UntypedStorage, holding: Holding) -> None:
        """At the last mark."""
        block = NamedBlock(category=holding.category, name=holding.name, size=storage.nbytes())
        self._marks[-1].named.setdefault(storage.data_ptr(), block)

    def phases(self, low: int, high: int) -> tuple[PhasePeak, ...]:
        """Of the windows from one to another, each from its mark to the next."""
        found: dict[PhaseName, PhasePeak] = {}
        for mark, after in zip(self._marks[low:high], self._marks[low + 1 : high + 1], strict=True):
            if (name := MEMORY_PHASE_OF.get(mark.phase)) is not None:
                phase = pinned_phase(name, after.active, after.owned, mark.named | after.named)
                if name not in found or phase.peak > found[name].peak:
                    found[name] = phase
        return tuple(found.values())


def pinned_phase(name: PhaseName, active: int, owned: int, named: Mapping[int, NamedBlock]) -> PhasePeak:
    """A phase: what is named, what that is rounded up to (a power of two), what is kept for later, and the rest."""
    active = min(active, owned)  # torch below 2.13 forgets to count down what is given back
    held: dict[Category, int] = {}
    for block in named.values():
        held[block.category] = held.get(block.category, 0) + block.size
    rounded = sum((1 << (block.size - 1).bit_length()) - block.size for block in named.values())
    held["runtime"] = min(rounded, max(0, active - sum(held.values()))) + owned - active
    held["unattributed"] = owned - sum(held.values())
    largest = sorted(named.values(), key=lambda b: -b.size)[:LARGEST_BLOCKS]
    held = {category: size for category, size in held.items() if size}
    return PhasePeak(name=name, peak=owned, held=held, largest=tuple(largest))
