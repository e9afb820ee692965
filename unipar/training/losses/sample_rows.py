"""Rows of samples on all ranks: gathered in the order of the global batch, and each microbatch's own found again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.distributed.world import World


@final
class SampleRows:
    """Rows of one step's global batch; all ranks make it together, from how many rows their microbatches have."""

    def __init__(self, world: World, rows: Sequence[int]) -> None:
        """Take this rank's rows of each microbatch; the first microbatch of every rank comes before the second."""
        self._world = world
        counts = torch.zeros(world.shares, len(rows), dtype=torch.int64, device=world.device)
        counts[world.share] = torch.tensor(rows, dtype=torch.int64)
        table: list[list[int]] = world.sum_shares(counts).tolist()
        self._of_ranks = [sum(of_rank) for of_rank in table]
        self._longest = max(self._of_ranks)
        self.total = sum(self._of_ranks)
        """Rows of the whole global batch."""

        within = [0] * world.shares
        order: list[int] = []
        self.own: list[slice] = []
        """Place of each of this rank's microbatches in the global batch."""

        for micro in range(len(rows)):
            for share, of_rank in enumerate(table):
                if share == world.share:
                    self.own.append(slice(len(order), len(order) + of_rank[micro]))
                first = share * self._longest + within[share]
                order += range(first, first + of_rank[micro])
                within[share] += of_rank[micro]
        self._order = torch.tensor(order, dtype=torch.int64, device=world.device)

    def gather(self, mine: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the samples, from this rank's, microbatch by microbatch."""
        if self._world.shares == 1:
            return mine
        flat = (
            mine.contiguous().view(len(mine), prod(mine.shape[1:])).view(torch.uint8)
        )  # bytes: gloo does not take every dtype
        padded = flat.new_zeros(self._longest, flat.shape[1])
        padded[: len(flat)] = flat
        of_ranks = [torch.empty_like(padded) for _ in range(self._world.shares)]
        whole = self._world.shares == self._world.size
        dist.all_gather(of_ranks, padded, group=None if whole else self._world.groups.group("data"))
        gathered = torch.cat(of_ranks)
        return gathered[self._order].view(mine.dtype).view(self.total, *mine.shape[1:])
