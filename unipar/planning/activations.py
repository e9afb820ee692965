"""Memory that a model allocates in a microbatch of any size, from records of microbatches of two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unipar.backend.prediction.timeline import Moment


@dataclass(frozen=True)
class AllocatedBlock:
    """One block of memory that the model's operations allocate: `base + slope * micro` bytes."""

    base: float
    slope: float
    operation: str
    where: str
    """Name of the module that ran; empty in backward."""

    born: int
    """Number of the event that allocates it."""

    died: int | None
    """Number of the event that frees it; None: it is there to the end."""

    becomes_gradient: bool = False
    """True if it is the gradient of a parameter from then on, which the backend's terms count."""

    def size(self, micro: int) -> int:
        """Return its bytes in a microbatch of so many samples."""
        return round(self.base + self.slope * micro)


@dataclass(frozen=True)
class Activations:
    """All blocks that a microbatch allocates, and the moments of the step by the number of events before them."""

    blocks: tuple[AllocatedBlock, ...]
    moments: tuple[tuple[int, Moment], ...]
    batch: tuple[float, float]
    """Base and slope of the bytes of the batch itself."""

    flops: tuple[float, float]
    """Base and slope of the operations of forward and backward."""

    @property
    def events(self) -> int:
        """Number of allocations and frees."""
        return len(self.blocks) + sum(block.died is not None for block in self.blocks)

    def levels(self, micro: int) -> Any:
        """Return the bytes that are allocated after each event, before the first one included."""
        return np.concatenate([[0], np.cumsum(self._changes @ np.array([1.0, micro]))])

    @cached_property
    def _changes(self) -> Any:
        changes = np.zeros((self.events, 2))
        for block in self.blocks:
            changes[block.born] += (block.base, block.slope)
            if block.died is not None:
                changes[block.died] -= (block.base, block.slope)
        return changes

    def alive(self, event: int) -> Sequence[AllocatedBlock]:
        """Return the blocks that are there after so many events."""
        return [b for b in self.blocks if b.born < event and (b.died is None or b.died >= event)]

    def outlives_its_phase(self, block: AllocatedBlock) -> bool:
        """Return whether a block is freed in a later phase than the one that allocated it: an activation."""
        return self._phase_of(block.born) != (None if block.died is None else self._phase_of(block.died))

    def _phase_of(self, event: int) -> str:
        phase = ""
        for before, moment in self.moments:
            if before > event:
                break
            phase = moment.phase
        return phase
