"""Memory that a model allocates in a microbatch of any size, from records of microbatches of two sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from unipar.prediction.terms import pinned_bytes
from unipar.prediction.timeline import CommVolume, MemoryPlace, Moment, Term

CopyOnCPU = Literal["gloo", "oneDNN"]
"""What copies tensors on the CPU: gloo those that it sends, and oneDNN those of a convolution."""


@dataclass(frozen=True)
class AllocatedBlock:
    """One block of memory that the model's operations allocate: `base + slope * micro` bytes."""

    base: float
    slope: float
    operation: str
    where: str
    """Name of the module that ran; empty in backward."""

    born: int
    """Tick at which it is allocated; each allocation and each moment of a step is a tick."""

    died: int | None
    """Last tick at which it is there; None: it is there to the end."""

    becomes_gradient: bool = False
    """True if it is the gradient of a parameter from then on, which the backend's terms count."""

    copied_by: CopyOnCPU | None = None
    """Library that makes it, if it is a copy that is made on the CPU alone."""

    place: MemoryPlace = "device"
    """Place of its bytes: those of `model.offload: activations` are on the host."""

    def size(self, micro: int) -> int:
        """Return its bytes in a microbatch of this many samples."""
        return round(self.base + self.slope * micro)


@dataclass(frozen=True)
class MicrobatchVolume:
    """Bytes that a microbatch sends along one axis by one collective: `base + slope * micro`."""

    axis: str
    collective: str
    base: float
    slope: float
    calls: int
    ranks: int

    def of_step(self, micro: int, microbatches: int) -> CommVolume:
        """Return the bytes sent in a step of this many microbatches."""
        size = round(self.base + self.slope * micro)
        return CommVolume(self.axis, self.collective, microbatches * size, microbatches * self.calls, self.ranks)


@dataclass(frozen=True)
class Activations:
    """All blocks that a microbatch allocates, and the moments of the step, each with its tick."""

    blocks: tuple[AllocatedBlock, ...]
    moments: tuple[tuple[int, Moment], ...]
    batch: tuple[float, float]
    """Base and slope of the bytes of the batch itself."""

    flops: tuple[float, float]
    """Base and slope of the operations of forward and backward."""

    recomputed: tuple[float, float] = (0.0, 0.0)
    """Base and slope of those of them that backward does again because of model.recompute."""

    operators: int = 0
    """Number of operators that compute something: kernels, about."""

    @cached_property
    def without_copies(self) -> Activations:
        """The same without copies that are made on the CPU alone."""
        if not any(block.copied_by for block in self.blocks):
            return self
        return replace(self, blocks=tuple(replace(b, base=0.0, slope=0.0) if b.copied_by else b for b in self.blocks))

    @property
    def ticks(self) -> int:
        """Number of allocations and moments."""
        return len(self.blocks) + len(self.moments)

    def levels(self, micro: int) -> Any:
        """Return the bytes that are allocated at each tick."""
        return np.cumsum(self._changes @ np.array([1.0, micro]))[:-1]

    @cached_property
    def _changes(self) -> Any:
        changes = np.zeros((self.ticks + 1, 2))
        for block in (block for block in self.blocks if block.place == "device"):
            changes[block.born] += (block.base, block.slope)
            if block.died is not None:
                changes[block.died + 1] -= (block.base, block.slope)
        return changes

    def alive(self, tick: int) -> Sequence[AllocatedBlock]:
        """Return the blocks that are on the device at a tick."""
        born, died = self._lives
        there = (self.blocks[number] for number in np.nonzero((born <= tick) & (died >= tick))[0])
        return [block for block in there if block.place == "device"]

    def on_host(self, micro: int, microbatches: int) -> Iterator[Term]:
        """Yield what this many microbatches keep on the host, each from one moment of the step to another."""
        ticks = [tick for tick, _ in self.moments]
        for block in (block for block in self.blocks if block.place == "host"):
            until = None if block.died is None else bisect_right(ticks, block.died)
            size = microbatches * pinned_bytes(block.size(micro))
            name = f"saved in {block.where}" if microbatches == 1 else f"saved in {block.where}, {microbatches} times"
            yield Term("activations", name, size, bisect_right(ticks, block.born) - 1, until, "host")

    @cached_property
    def _lives(self) -> tuple[Any, Any]:
        """First and last tick of each block."""
        ends = [self.ticks if block.died is None else block.died for block in self.blocks]
        return np.array([block.born for block in self.blocks]), np.array(ends)

    def outlives_its_phase(self, block: AllocatedBlock) -> bool:
        """Return whether a block is freed in a later phase than the one that allocated it: an activation."""
        return self._phase_of(block.born) != (None if block.died is None else self._phase_of(block.died))

    def _phase_of(self, tick: int) -> str:
        place = bisect_right(self._begins, tick, key=lambda begin: begin[0])
        return self._begins[place - 1][1] if place else ""

    @cached_property
    def _begins(self) -> Sequence[tuple[int, str]]:
        """Tick at which each phase begins."""
        return [(at, moment.phase) for at, moment in self.moments if moment.what == "begin"]
