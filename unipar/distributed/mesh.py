"""Mesh of ranks: axes by name, and the seat of a rank along each. The one place for this arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unipar.errors import TaskError

MESH_AXES = ("pipeline", "data", "context", "tensor")
"""Axes of a mesh, slowest first: ranks of one tensor group are neighbours, stages are farthest from each other."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of a mesh's axes, and this rank's seat along each."""

    sizes: Mapping[str, int]
    seat: Mapping[str, int]
    expert: int = 1
    """Neighbouring ranks of the data that have all experts together."""

    @classmethod
    def of(
        cls, rank: int, ranks: int, *, tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1
    ) -> Mesh:
        """Return the mesh of this many ranks; the data has the ranks that the other axes leave."""
        data = ranks // (tensor * pipeline * context)
        sizes = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
        return cls(sizes, _seat(rank, sizes), expert)

    @property
    def expert_seat(self) -> int:
        """Place of this rank among those that have all experts together."""
        return self.seat["data"] % self.expert

    def seat_of(self, rank: int) -> Mapping[str, int]:
        """Return the seat of another rank along each axis."""
        return _seat(rank, self.sizes)

    def line(self, rank: int, axes: Collection[str]) -> list[int]:
        """Return the ranks whose seats differ from those of `rank` along these axes alone, ascending; it is one."""
        seat = self.seat_of(rank)
        seats = [range(self.sizes[name]) if name in axes else (seat[name],) for name in MESH_AXES]
        return [self.rank_at(**dict(zip(MESH_AXES, each, strict=True))) for each in product(*seats)]

    def rank_at(self, **seat: int) -> int:
        """Return the rank with these seats; along an axis that is left out, this rank's own seat."""
        rank = 0
        for name in MESH_AXES:
            rank = rank * self.sizes[name] + seat.get(name, self.seat[name])
        return rank

    @property
    def ranks(self) -> int:
        """Number of ranks in all."""
        return prod(self.sizes.values())

    def axes_among(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the axes along which these ranks have different seats."""
        seats = [self.seat_of(rank) for rank in ranks]
        return tuple(name for name in MESH_AXES if len({seat[name] for seat in seats}) > 1)

    @property
    def leads(self) -> bool:
        """Whether this rank counts among those that train on the same samples: in the last stage, first otherwise."""
        first = self.seat["tensor"] == 0 and self.seat["context"] == 0
        return first and self.seat["pipeline"] == self.sizes["pipeline"] - 1


def _seat(rank: int, sizes: Mapping[str, int]) -> Mapping[str, int]:
    seat: dict[str, int] = {}
    for name in reversed(MESH_AXES):
        rank, seat[name] = divmod(rank, sizes[name])
    return {name: seat[name] for name in MESH_AXES}


class MeshGroups:
    """Process groups along the axes of a mesh, made when they are first asked for, by all ranks together."""

    def __init__(self, mesh: Mesh, device_type: str) -> None:
        self.mesh, self.device_type = mesh, device_type
        self.axis_of_group: dict[str, str] = {}
        """Axis along which a process group lies, by the group's name: one of `MESH_AXES`, or `expert`."""

        self._meshes: dict[tuple[str | int, ...], DeviceMesh] = {}

    @property
    def devices(self) -> DeviceMesh:
        """Named mesh of all ranks: pipeline, data, context, tensor."""
        return self._device_mesh(tuple(self.mesh.sizes[name] for name in MESH_AXES), MESH_AXES)

    def create_together(self) -> None:
        """Create the groups of all axes, which all ranks do at the same time."""
        _ = self.devices

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along an axis."""
        return self.devices.get_group(axis)

    def second_group(self, axis: str) -> dist.ProcessGroup:
        """Return another group of the same ranks where messages of one could overtake those of the other, else it."""
        if self.device_type == "cpu":
            return self.group(axis)
        key = (axis, "again")
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device_type, self.devices.shape, mesh_dim_names=MESH_AXES)
            self.axis_of_group[self._meshes[key].get_group(axis).group_name] = axis
        return self._meshes[key].get_group(axis)

    def host_group(self, axis: str) -> dist.ProcessGroup:
        """Return a group of the same ranks for tensors in host memory: their messages wait for no device."""
        if self.device_type == "cpu":
            return self.group(axis)
        key = (axis, "host")
        if key not in self._meshes:
            transports: Any = dict.fromkeys(MESH_AXES, "gloo")
            shape = self.devices.shape
            self._meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=MESH_AXES, backend_override=transports)
            self.axis_of_group[self._meshes[key].get_group(axis).group_name] = axis
        return self._meshes[key].get_group(axis)

    def copies_and_shards(self, shards: int) -> DeviceMesh:
        """Return a 2-D mesh of the ranks that train the same parameters: copies x `shards` ranks that split one copy.

        Ranks that split a sequence train the same parameters, as those with other samples do.
        """
        sizes = self.mesh.sizes
        copies = sizes["data"] * sizes["context"] // shards
        names = ("pipeline", "copies", "shards", "tensor")
        full_mesh = self._device_mesh((sizes["pipeline"], copies, shards, sizes["tensor"]), names)
        return full_mesh["copies", "shards"]

    def copies_of_ranks(self, shape: tuple[int, ...], ranks: Sequence[int]) -> DeviceMesh:
        """Return a 2-D mesh as `copies_and_shards` does, from the ranks by stage, copy, shard and seat in `tensor`."""
        return self._device_mesh(shape, ("pipeline", "copies", "shards", "tensor"), ranks)["copies", "shards"]

    def experts(self) -> dist.ProcessGroup:
        """Return the group of this rank's neighbours that have all experts together."""
        return self._ranks_by_experts(1).get_group("expert")

    def copies_and_shards_of_experts(self, shards: int) -> DeviceMesh:
        """Return a 2-D mesh as `copies_and_shards` does, of the ranks that train the same experts."""
        return self._ranks_by_experts(shards)["copies", "shards"]

    def _ranks_by_experts(self, shards: int) -> DeviceMesh:
        sizes, expert = self.mesh.sizes, self.mesh.expert
        ranks = torch.arange(self.mesh.ranks).view(
            sizes["pipeline"], sizes["data"] // expert, expert, sizes["context"], sizes["tensor"]
        )
        copies = sizes["data"] // expert * sizes["context"] // shards
        shape = (sizes["pipeline"], expert, copies, shards, sizes["tensor"])
        names = ("pipeline", "expert", "copies", "shards", "tensor")
        return self._device_mesh(shape, names, ranks.transpose(1, 2).flatten().tolist())

    def _device_mesh(
        self, shape: tuple[int, ...], names: tuple[str, ...], ranks: Sequence[int] | None = None
    ) -> DeviceMesh:
        key = (*names, *shape, *(ranks or ()))
        if key not in self._meshes:
            if ranks is None:
                made = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
            else:
                made = DeviceMesh(self.device_type, torch.tensor(ranks).view(shape), mesh_dim_names=names)
            self._meshes[key] = made
            for name in names:
                axis = "data" if name in ("copies", "shards") else name
                group: Any = made.get_group(name)
                self.axis_of_group[group.group_name] = axis
        return self._meshes[key]


@contextmanager
def fake_groups(mesh: Mesh) -> Generator[MeshGroups]:
    """Context manager: groups of a mesh without peers, whose collectives move nothing; this process has its seat."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # slow to import, and only plans need it

    if dist.is_initialized():
        raise TaskError(
            "plan: a model that is split over tensor, pipeline or context is planned in groups without peers, and this "
            "process is in a process group already: plan in another process, or before training starts"
        )
    dist.init_process_group("fake", rank=mesh.rank_at(), world_size=mesh.ranks, store=FakeStore())
    try:
        yield MeshGroups(mesh, "cpu")
    finally:
        dist.destroy_process_group()
