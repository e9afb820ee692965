"""Rows of samples on all ranks: gathered in the order of the global batch, and each microbatch's own found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.backend import Micro
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar.task import Share


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
        flat = _as_bytes(mine)
        padded = flat.new_zeros(self._longest, flat.shape[1])
        padded[: len(flat)] = flat
        of_ranks = [torch.empty_like(padded) for _ in range(self._world.shares)]
        whole = self._world.shares == self._world.size
        dist.all_gather(of_ranks, padded, group=None if whole else self._world.groups.group("data"))
        gathered = torch.cat(of_ranks)
        return gathered[self._order].view(mine.dtype).view(self.total, *mine.shape[1:])


def gather_rows(world: World, tensor: Tensor, of: Share | Micro | None, current: Share | None) -> Tensor:
    """Return a tensor's rows of all ranks, as `Run.gather` says; `current`: the share that the loop has now, if any."""
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    shown = f"{rows.dtype} and the shape {[..., *rows.shape[1:]]}".replace("Ellipsis", "...")
    world.agree(
        "gather",
        shown,
        lambda first: (
            f"run.gather() got rows of {shown} on rank {world.rank}, and of {first} on rank 0: pad or cast them first"
        ),
    )
    if of is None and current is not None:
        fits = torch.tensor([float(sum(_sizes(current)) == len(rows))], device=world.device)
        of = current if world.sum(fits).item() == world.size else None
    if isinstance(of, Share) and len(of) > 1:
        if sum(sizes := _sizes(of)) != len(rows):
            raise TaskError(
                f"run.gather() got {len(rows)} rows of a share that has {sum(sizes)} in {len(of)} microbatches: gather "
                "those of one microbatch at a time (run.gather(tensor, share.micros[i]))"
            )
        parts, micros = rows.split(sizes), of.micros
    else:
        parts, micros = [rows], of.micros if isinstance(of, Share) else [of]
    counted = [part if micro is None or micro.scale else part[:0] for part, micro in zip(parts, micros, strict=True)]
    return _all_rows(world, counted).to(tensor.device)


def _all_rows(world: World, parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of each part of all ranks, the first part of each rank first; ranks of one share count once."""
    if world.size == 1:
        return torch.cat([*parts])
    mine = torch.cat([*parts]).to(world.device).contiguous()
    table = torch.zeros(world.size, len(parts) + 1, dtype=torch.int64, device=world.device)
    table[world.rank] = torch.tensor([*map(len, parts), world.share if world.leads else -1])
    counts: list[list[int]] = world.sum(table).tolist()
    flat = _as_bytes(mine)
    padded = flat.new_zeros(max(sum(row[:-1]) for row in counts), flat.shape[1])
    padded[: len(flat)] = flat
    of_ranks = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(of_ranks, padded)
    leading = sorted((row[-1], rank) for rank, row in enumerate(counts) if row[-1] >= 0)
    pieces = [of_ranks[rank][: sum(counts[rank][:-1])].split(counts[rank][:-1]) for _, rank in leading]
    rows = torch.cat([piece for of_part in zip(*pieces, strict=True) for piece in of_part])
    return rows.view(mine.dtype).view(-1, *mine.shape[1:]) if rows.numel() else mine[:0]


def _as_bytes(rows: Tensor) -> Tensor:
    """Return rows as bytes: gloo does not take every dtype."""
    return rows.contiguous().view(len(rows), prod(rows.shape[1:])).view(torch.uint8)


def _sizes(share: Share) -> list[int]:
    """Return how many rows each microbatch has, by its first tensor."""
    return [_first_size(micro.batch) for micro in share.micros]


def _first_size(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    inside: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for item in inside if (size := _first_size(item))), 0)
