"""Parts of matrices on ranks: which rank has which elements, who updates each matrix, and how gradients get there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, final

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
    full: dict[int, Tensor] = {}
    for exchange in _exchanges(parts):
        mine = exchange.owned[exchange.here]
        sent = [[parts[i].gradient for i in owned] for owned in exchange.owned]
        got = exchange.send(sent, [[exchange.range_of(i, rank)[1] for i in mine] for rank in exchange.ranks])
        for at, i in enumerate(mine):
            rows = [row[at] for row in got]
            full[i] = (rows[0] if len(rows) == 1 else torch.cat(rows)).view(parts[i].layout.shape)
    return full


def scatter_updates(parts: Sequence[MatrixPart], updates: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return this rank's part of each matrix's update, as one row, by its number; all ranks call it together."""
    own: dict[int, Tensor] = {}
    for exchange in _exchanges(parts):
        mine = [(i, updates[i].reshape(-1)) for i in exchange.owned[exchange.here]]
        sent = [[row.narrow(0, *exchange.range_of(i, rank)) for i, row in mine] for rank in exchange.ranks]
        here = exchange.here
        got = exchange.send(sent, [[exchange.range_of(i, here)[1] for i in owned] for owned in exchange.owned])
        for owned, rows in zip(exchange.owned, got, strict=True):
            own |= zip(owned, rows, strict=True)
    return own


@final
class _Exchange:
    """Matrices whose parts travel together: of one group of ranks, and of one dtype."""

    def __init__(self, parts: Mapping[int, MatrixPart]) -> None:
        first = next(iter(parts.values()))
        self._parts, self._group, self._like = parts, first.layout.group, first.gradient
        self._device = torch.device(first.layout.device or first.gradient.device.type)
        self.here = 0 if self._group is None else dist.get_rank(self._group)
        self.ranks = range(len(first.layout.ranges))
        self.owned = [[i for i, part in parts.items() if part.owner == rank] for rank in self.ranks]
        """Numbers of the matrices that each rank updates."""

    def range_of(self, number: int, rank: int) -> tuple[int, int]:
        """Return the first element and the number of elements that a rank has of a matrix."""
        return self._parts[number].layout.ranges[rank]

    def send(self, sent: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]]) -> Sequence[Sequence[Tensor]]:
        """Send rows to each rank of the group; return those that came from each, of these lengths."""
        if self._group is None:
            return sent
        dtype, device = self._like.dtype, self._device
        rows = [t.to(device) for row in sent for t in row]
        out = torch.cat(rows) if rows else torch.empty(0, dtype=dtype, device=device)
        sizes = [sum(row) for row in lengths]
        got = torch.empty(sum(sizes), dtype=dtype, device=device)
        dist.all_to_all_single(got, out, sizes, [sum(t.numel() for t in row) for row in sent], group=self._group)
        return [
            part.to(self._like.device).split(list(own)) if own else ()
            for part, own in zip(got.split(sizes), lengths, strict=True)
        ]


def _exchanges(parts: Sequence[MatrixPart]) -> list[_Exchange]:
    by_group: dict[tuple[int, torch.dtype], dict[int, MatrixPart]] = {}
    for number, part in enumerate(parts):
        by_group.setdefault((id(part.layout.group), part.gradient.dtype), {})[number] = part
    return [_Exchange(together) for together in by_group.values()]
