"""Rows of samples on all ranks: gathered in the order of the global batch, and each microbatch's own found again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.backend import Micro
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.errors import TaskError
from unipar.task import LocalBatch


@final
class SampleRows:
    """Rows of one step's global batch; all ranks make it together, from how many rows their microbatches have."""

    def __init__(self, world: World, rows: Sequence[int], of_ranks: Sequence[Sequence[int]] = ()) -> None:
        """Take this rank's rows of each microbatch; the first microbatch of every rank comes before the second.

        `of_ranks`: rows of each rank, by microbatch, if they are known; else the ranks tell one another.
        """
        self._world = world
        table = [list(row) for row in zip(*of_ranks, strict=True)] if of_ranks else _exchange_rows(world, rows)
        assert table[world.data_rank] == [*rows], f"{table[world.data_rank]} rows were planned, and there are {[*rows]}"
        self._of_ranks = [sum(of_rank) for of_rank in table]
        self._longest = max(self._of_ranks)
        self.total = sum(self._of_ranks)
        """Rows of the whole global batch."""

        within = [0] * world.data_size
        order: list[int] = []
        self.own: list[slice] = []
        """Place of each of this rank's microbatches in the global batch."""

        for micro in range(len(rows)):
            for data_rank, of_rank in enumerate(table):
                if data_rank == world.data_rank:
                    self.own.append(slice(len(order), len(order) + of_rank[micro]))
                first = data_rank * self._longest + within[data_rank]
                order += range(first, first + of_rank[micro])
                within[data_rank] += of_rank[micro]
        self._order: Tensor = to_device(torch.tensor(order, dtype=torch.int64), world.device)

    def gather(self, mine: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the samples, from this rank's, microbatch by microbatch."""
        if self._world.data_size == 1:
            return mine
        flat = _as_bytes(mine)
        padded = flat.new_zeros(self._longest, flat.shape[1])
        padded[: len(flat)] = flat
        of_ranks = [torch.empty_like(padded) for _ in range(self._world.data_size)]
        all_ranks = self._world.data_size == self._world.size
        dist.all_gather(of_ranks, padded, group=None if all_ranks else self._world.groups.group("data"))
        gathered = torch.cat(of_ranks)
        return gathered[self._order].view(mine.dtype).view(self.total, *mine.shape[1:])


def _exchange_rows(world: World, rows: Sequence[int]) -> list[list[int]]:
    """Return the rows of each rank's microbatches; a collective, for which the host waits."""
    if world.data_size == 1:
        return [[*rows]]
    counts = torch.zeros(world.data_size, len(rows), dtype=torch.int64)
    counts[world.data_rank] = torch.tensor(rows, dtype=torch.int64)
    return world.sum_over_data(counts.to(world.device)).tolist()


def gather_rows(world: World, tensor: Tensor, of: LocalBatch | Micro | None, current: LocalBatch | None) -> Tensor:
    """Return a tensor's rows of all ranks, as `Run.gather` says; `current`: the loop's local batch, if any."""
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    if of is None and current is not None:
        fits = torch.tensor([float(sum(_row_counts(current)) == len(rows))], device=world.device)
        of = current if world.sum(fits).item() == world.size else None
    if isinstance(of, LocalBatch) and len(of) > 1:
        if sum(sizes := _row_counts(of)) != len(rows):
            raise TaskError(
                f"run.gather() got {len(rows)} rows of a local batch that has {sum(sizes)} in {len(of)} microbatches: "
                "gather those of one microbatch at a time (run.gather(tensor, local_batch.micros[i]))"
            )
        parts, micros = rows.split(sizes), of.micros
    else:
        parts, micros = [rows], of.micros if isinstance(of, LocalBatch) else [of]
    counted = [part if micro is None or micro.scale else part[:0] for part, micro in zip(parts, micros, strict=True)]
    return _all_rows(world, counted).to(tensor.device)


def _all_rows(world: World, parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of each part of all ranks, first parts first; ranks with the same samples count once."""
    if world.size == 1:
        return torch.cat([*parts])
    mine = torch.cat([*parts]).to(world.device).contiguous()
    kind = f"{mine.dtype} and the shape [{', '.join(map(str, ('...', *mine.shape[1:])))}]"
    table = torch.zeros(world.size, 2 + len(parts), dtype=torch.int64, device=world.device)
    table[world.rank] = torch.tensor(
        [zlib.crc32(kind.encode()), world.data_rank if world.leads else -1, *map(len, parts)], dtype=torch.int64
    )
    kinds, data_ranks, *columns = world.sum(table).T.tolist()
    if (other := next((rank for rank, one in enumerate(kinds) if one != kinds[world.rank]), None)) is not None:
        raise TaskError(
            f"run.gather() got rows of {kind} on rank {world.rank}, and of another dtype or shape on rank {other}: "
            "cast them, or pad them to one shape, first"
        )
    counts: list[list[int]] = [list(of_rank) for of_rank in zip(*columns, strict=True)]
    flat = _as_bytes(mine)
    padded = flat.new_zeros(max(map(sum, counts)), flat.shape[1])
    padded[: len(flat)] = flat
    of_ranks = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(of_ranks, padded)
    leading = sorted((data_rank, rank) for rank, data_rank in enumerate(data_ranks) if data_rank >= 0)
    pieces = [of_ranks[rank][: sum(counts[rank])].split(counts[rank]) for _, rank in leading]
    rows = torch.cat([piece for of_part in zip(*pieces, strict=True) for piece in of_part])
    return rows.view(mine.dtype).view(-1, *mine.shape[1:]) if rows.numel() else mine[:0]


def _as_bytes(rows: Tensor) -> Tensor:
    """Return rows as bytes: gloo does not take every dtype."""
    return rows.contiguous().view(len(rows), prod(rows.shape[1:])).view(torch.uint8)


def _row_counts(local_batch: LocalBatch) -> list[int]:
    """Return how many rows each microbatch has, by its first tensor."""
    return [_first_size(micro.batch) for micro in local_batch.micros]


def _first_size(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    inside: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for item in inside if (size := _first_size(item))), 0)
