"""State of a model on one rank: local ranges of tensors, buffers, and tensors kept on modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from unipar.backend import Holding, Piece, Read, Region
from unipar.distributed.world import World
from unipar.engines.placement import plain_attributes


def local_regions(t: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield each region of `t` that this rank holds, with its elements."""
    if not isinstance(t, DTensor):
        yield Region(0, t.numel()), t
        return
    local = t.to_local()
    first = 0
    for region in _regions_of_shard(t.shape, t.device_mesh, t.placements):
        yield region, local.view(-1)[first : first + region.numel]
        first += region.numel


@lru_cache(maxsize=128)
def _regions_of_shard(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[Region, ...]:
    """Return this rank's regions of a tensor; asked for each tensor of each block, of which many are alike."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(box_regions(shape, offsets, sizes))


def box_regions(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Region]:
    """Yield the regions that make up a box of a tensor of this shape, in row-major order; an empty box is one."""
    if prod(sizes) == 0:
        yield Region(0, 0)
        return
    cut = [i for i, size in enumerate(sizes) if size != shape[i]]
    if not cut:
        yield Region(0, prod(shape))
        return
    last = cut[-1]
    inner = prod(shape[last + 1 :])
    start, length, stride = offsets[last] * inner, sizes[last] * inner, shape[last] * inner
    for rows in box_regions(shape[:last], offsets[:last], sizes[:last]):
        for i in range(rows.runs):
            row = rows.start + i * rows.stride
            yield Region(start + row * stride, length, stride if rows.length > 1 else 0, rows.length)


def local_part(t: Tensor) -> Tensor:
    """Return the part of `t` that this rank holds."""
    with torch.no_grad():
        return t.to_local() if isinstance(t, DTensor) else t


def is_first_copy(t: Tensor, world: World) -> bool:
    """Return whether this rank's part of `t` belongs to the first of several equal copies."""
    if not isinstance(t, DTensor):
        return world.rank == 0
    here = t.device_mesh.get_coordinate()
    assert here is not None
    return all(at == 0 for at, p in zip(here, t.placements, strict=True) if p.is_replicate())


def steps_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer counts steps on its parameters' devices, as torch's fused and capturable ones do."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def buffer_pieces(buffers: Iterable[tuple[str, Tensor]]) -> Iterator[Piece]:
    """Yield buffers, which every rank has whole, as pieces of state."""
    for name, b in buffers:
        yield Piece(name, "buffer", tuple(b.shape), Region(0, b.numel()), b)


def module_holdings(model: nn.Module) -> Iterator[Holding]:
    """Yield buffers, tensors that the user's code keeps as attributes of modules, and offloaded activations."""
    for name, b in model.named_buffers():
        yield Holding("buffers", name, b)
    for prefix, module in model.named_modules():
        for name, value in plain_attributes(module).items():
            for tensor in _find_tensors(value):
                yield Holding("buffers", f"{prefix}.{name}".removeprefix("."), tensor)
        saved = getattr(module.__dict__.get("forward"), "unipar_saved", None)
        for tensor in saved() if saved is not None else ():
            yield Holding("activations", f"saved in {prefix}", tensor)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield local_part(value)
    elif isinstance(value, list | tuple | dict):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _find_tensors(inner)


@torch.no_grad()
def restore_buffers(buffers: Iterable[tuple[str, Tensor]], read: Read) -> None:
    """Fill buffers from `read`."""
    for name, b in buffers:
        read.fill(b, name, "buffer", Region(0, b.numel()))


def broadcast_module_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to every rank: running statistics differ, and all ranks must evaluate the same model."""
    if dist.get_world_size() > 1:
        for b in model.buffers():
            dist.broadcast(b, 0)
