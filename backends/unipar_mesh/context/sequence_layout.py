"""Places of a sequence's positions on the ranks that have parts of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """Places of positions on ranks: rank r of C has parts r and 2C-1-r of 2C, so that causal attention is even work."""

    length: int
    ranks: int
    rank: int

    @cached_property
    def bounds(self) -> list[int]:
        """First position of each of the 2C parts, and the length: parts differ by one position at most."""
        parts = 2 * self.ranks
        sizes = [self.length // parts + (i < self.length % parts) for i in range(parts)]
        return [0, *accumulate(sizes)]

    def spans(self, rank: int) -> tuple[range, range]:
        """Return the two ranges of positions that a rank has."""
        first, second = rank, 2 * self.ranks - 1 - rank
        return (
            range(self.bounds[first], self.bounds[first + 1]),
            range(self.bounds[second], self.bounds[second + 1]),
        )

    def count(self, rank: int | None = None) -> int:
        """Return how many positions a rank has; without a rank: this one."""
        return sum(map(len, self.spans(self.rank if rank is None else rank)))

    @cached_property
    def most(self) -> int:
        """Positions of the rank that has most: collectives send this many of each."""
        return max(self.count(rank) for rank in range(self.ranks))

    def positions(self, device: torch.device, rank: int | None = None) -> Tensor:
        """Return the positions that a rank has, in its order; without a rank: this one."""
        spans = self.spans(self.rank if rank is None else rank)
        return torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])

    def places(self, device: torch.device) -> Tensor:
        """Return, for each position of the sequence, its row in the parts of all ranks, padded and laid end to end."""
        rows = torch.empty(self.length, dtype=torch.int64, device=device)
        for rank in range(self.ranks):
            mine = self.positions(device, rank)
            rows[mine] = torch.arange(len(mine), device=device) + rank * self.most
        return rows

    def tasks(self, keys_of: int, *, causal: bool) -> list[tuple[slice, slice, bool]]:
        """Return what this rank's queries have to do with a rank's keys: rows of both, and whether causal inside."""
        n, m = self.count(), self.count(keys_of)
        if not causal:
            return [(slice(0, n), slice(0, m), False)]
        if keys_of == self.rank:  # its positions are in ascending order: causal in its own order is causal in the whole
            return [(slice(0, n), slice(0, n), True)]
        if keys_of < self.rank:  # both parts come after that rank's first part, and before its second
            return [(slice(0, n), slice(0, len(self.spans(keys_of)[0])), False)]
        return [(slice(len(self.spans(self.rank)[0]), n), slice(0, m), False)]
