"""State of a model on one rank: local ranges of tensors, buffers, and tensors kept on modules."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unipar.backend import Holding, Piece, Read
from unipar.distributed.world import World
from unipar.engines.placement import plain_attributes


def locate_shard(t: Tensor) -> tuple[tuple[int, ...], tuple[int, int], Tensor]:
    """Return the global shape of `t`, the flat range of it that this rank holds, and the local tensor."""
    if not isinstance(t, DTensor):
        return tuple(t.shape), (0, t.numel()), t
    local, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    start = offset[0] * prod(t.shape[1:]) if prod(local) else 0
    return tuple(t.shape), (start, start + prod(local)), t.to_local()


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


def buffer_pieces(model: nn.Module, world: World) -> Iterator[Piece]:
    """Yield the model's buffers on rank 0: every rank has them whole, and rank 0's are the ones to keep."""
    if world.rank == 0:
        for name, b in model.named_buffers():
            yield Piece(name, "buffer", tuple(b.shape), (0, b.numel()), b)


def module_holdings(model: nn.Module) -> Iterator[Holding]:
    """Yield buffers, and tensors that the user's code keeps as attributes of modules."""
    for name, b in model.named_buffers():
        yield Holding("buffers", name, b)
    for prefix, module in model.named_modules():
        for name, value in plain_attributes(module).items():
            for tensor in _find_tensors(value):
                yield Holding("buffers", f"{prefix}.{name}".removeprefix("."), tensor)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield local_part(value)
    elif isinstance(value, list | tuple | dict):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _find_tensors(inner)


@torch.no_grad()
def restore_buffers(model: nn.Module, read: Read) -> None:
    """Fill all buffers from `read`."""
    for name, b in model.named_buffers():
        b.view(-1).copy_(read(name, "buffer", (0, b.numel())))


def broadcast_module_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to every rank: running statistics differ, and all ranks must evaluate the same model."""
    if dist.get_world_size() > 1:
        for b in model.buffers():
            dist.broadcast(b, 0)
