"""Parts of matrices on ranks: which rank has which elements, who updates each matrix, and how gradients get there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from unipar.errors import TaskError


@dataclass(frozen=True)
class MatrixLayout:
    """Elements of one matrix by rank: a range in row-major order for each rank of a group."""

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    """First element and number of elements, for each rank of the group."""

    group: dist.ProcessGroup | None = None
    """Ranks that have the parts; None: every rank has the whole matrix."""

    device: str = ""
    """Type of the device from which the group sends."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> MatrixLayout:
        """Return the layout of a matrix that every rank has."""
        return cls(tuple(shape), ((0, prod(shape)),))

    @classmethod
    def of(cls, p: Tensor) -> MatrixLayout:
        """Return the layout of a parameter: a DTensor is split by rows over one dimension of its mesh."""
        shape = tuple(p.shape)
        if not isinstance(p, DTensor):
            return cls.whole(shape)
        mesh = p.device_mesh
        cuts = [i for i, placement in enumerate(p.placements) if not placement.is_replicate() and mesh.size(i) > 1]
        if not cuts:
            return cls.whole(shape)
        if len(cuts) > 1 or p.placements[cuts[0]] != Shard(0):
            raise TaskError(
                f"a matrix of {shape[0]} x {shape[1]} is split as {p.placements}: an optimizer by whole matrices joins "
                "rows alone; leave parallel.tensor out, or take adamw"
            )
        ranks, columns = mesh.size(cuts[0]), shape[1]
        rows = -(-shape[0] // ranks)
        starts = [min(rank * rows, shape[0]) for rank in range(ranks + 1)]
        ranges = tuple((a * columns, (b - a) * columns) for a, b in pairwise(starts))
        return cls(shape, ranges, mesh.get_group(cuts[0]), mesh.device_type)

    @property
    def cost(self) -> int:
        """Number by which the work of an update is shared out: multiplications of the matrix by itself."""
        return prod(self.shape) * min(self.shape)


@dataclass(frozen=True)
class MatrixPart:
    """This rank's part of a matrix in a step."""

    parameter: Tensor
    """The model's parameter, by which the optimizer keeps its state."""

    layout: MatrixLayout
    owner: int
    """Rank in the layout's group that updates the whole matrix."""

    settings: Mapping[str, Any]
    """The optimizer's group."""

    weight: Tensor
    """This rank's elements, as one row; writing into it changes the parameter."""

    gradient: Tensor
    """Gradients of these elements, as one row."""


class FlatMatrix(NamedTuple):
    """Matrix of which this rank has its range inside a flat tensor, beside others."""

    parameter: Tensor
    """The model's parameter, by which the optimizer keeps its state."""

    layout: MatrixLayout
    first: int
    """Place of the range's first element in the flat tensor."""


def assign_owners(layouts: Sequence[MatrixLayout]) -> list[int]:
    """Return the rank within its group that updates each matrix: the largest first, each to who has least to do."""
    work: dict[tuple[int, int], int] = {}
    owners = [0] * len(layouts)
    for number in sorted(range(len(layouts)), key=lambda i: -layouts[i].cost):
        layout = layouts[number]
        owners[number] = min(range(len(layout.ranges)), key=lambda rank: work.get((id(layout.group), rank), 0))
        place = id(layout.group), owners[number]
        work[place] = work.get(place, 0) + layout.cost
    return owners


def gather_gradients(parts: Sequence[MatrixPart]) -> dict[int, Tensor]:
    """Return the whole gradient of each matrix that this rank updates, by its number; all ranks call it together."""
    whole: dict[int, Tensor] = {}
    for numbers in _by_group(parts):
        first = parts[numbers[0]].layout
        if first.group is None:
            whole |= {i: parts[i].gradient.view(parts[i].layout.shape) for i in numbers}
            continue
        here, ranks = dist.get_rank(first.group), range(len(first.ranges))
        owned = {rank: [i for i in numbers if parts[i].owner == rank] for rank in ranks}
        sent = [[parts[i].gradient for i in owned[rank]] for rank in ranks]
        lengths = [[parts[i].layout.ranges[rank][1] for i in owned[here]] for rank in ranks]
        got = _exchange(sent, lengths, first, parts[numbers[0]].gradient)
        for at, i in enumerate(owned[here]):
            whole[i] = torch.cat([got[rank][at] for rank in ranks]).view(parts[i].layout.shape)
    return whole


def scatter_updates(parts: Sequence[MatrixPart], updates: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return this rank's part of each matrix's update, as one row, by its number; all ranks call it together."""
    mine: dict[int, Tensor] = {}
    for numbers in _by_group(parts):
        first = parts[numbers[0]].layout
        if first.group is None:
            mine |= {i: updates[i].reshape(-1) for i in numbers}
            continue
        here, ranks = dist.get_rank(first.group), range(len(first.ranges))
        owned = {rank: [i for i in numbers if parts[i].owner == rank] for rank in ranks}
        sent = [
            [updates[i].reshape(-1).narrow(0, *parts[i].layout.ranges[rank]) for i in owned[here]] for rank in ranks
        ]
        lengths = [[parts[i].layout.ranges[here][1] for i in owned[rank]] for rank in ranks]
        got = _exchange(sent, lengths, first, parts[numbers[0]].gradient)
        mine |= {i: t for rank in ranks for i, t in zip(owned[rank], got[rank], strict=True)}
    return mine


def _by_group(parts: Sequence[MatrixPart]) -> Iterable[list[int]]:
    """Return the numbers of parts that travel in one exchange: of one group of ranks, and of one dtype."""
    found: dict[tuple[int, torch.dtype], list[int]] = {}
    for number, part in enumerate(parts):
        found.setdefault((id(part.layout.group), part.gradient.dtype), []).append(number)
    return found.values()


def _exchange(
    sent: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]], layout: MatrixLayout, like: Tensor
) -> list[Sequence[Tensor]]:
    """Send rows to each rank of the layout's group; return those that came from each, of these lengths."""
    device = torch.device(layout.device or like.device.type)
    rows = [t.to(device) for row in sent for t in row]
    out = torch.cat(rows) if rows else torch.empty(0, dtype=like.dtype, device=device)
    sizes = [sum(row) for row in lengths]
    got = torch.empty(sum(sizes), dtype=like.dtype, device=device)
    dist.all_to_all_single(got, out, sizes, [sum(t.numel() for t in row) for row in sent], group=layout.group)
    return [
        part.to(like.device).split(list(own)) if own else ()
        for part, own in zip(got.split(sizes), lengths, strict=True)
    ]
