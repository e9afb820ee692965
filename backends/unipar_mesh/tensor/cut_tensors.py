"""Tensors of a trial that are cut: DTensors that remember which projections they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten
from typing_extensions import override

from unipar_mesh.tensor.cuts import Cut


def mesh_of(ranks: int) -> DeviceMesh:
    """Return a mesh without process groups: a trial's tensors are cut over it, and nothing is ever sent."""
    return DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("tensor",), _init_backend=False, _rank=0)


def place_of(x: DTensor) -> tuple[int, int]:
    """Return the dimension along which a tensor is cut, and in how many groups."""
    placement: Any = x.placements[0]
    return placement.dim % x.ndim, getattr(placement, "split_factor", 1)


def sources_of(x: Any) -> tuple[str, ...]:
    """Return the projections that led to a tensor."""
    return getattr(x, "_unipar_sources", ())


def sizes_behind(x: Any) -> tuple[int, ...] | None:
    """Return the sizes of groups that differ, right behind the projection."""
    return getattr(x, "_unipar_sizes", None)


def mark_sources(x: Any, sources: tuple[str, ...]) -> None:
    """Note further projections that led to a tensor."""
    x._unipar_sources = tuple(dict.fromkeys((*sources_of(x), *sources)))


def part_of(x: Tensor, dim: int, groups: int, ranks: int) -> Tensor:
    """Return the first rank's part of a whole tensor."""
    parts = [x.narrow(dim, *span) for span in Cut("column", groups).spans(x.shape[dim], 0, ranks)]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def cut_tensor(local: Tensor, mesh: DeviceMesh, dim: int, groups: int) -> DTensor:
    """Return a DTensor that is cut along `dim`, of which this is one part."""
    local = local.contiguous()
    placement: Any = Shard(dim) if groups == 1 else _StridedShard(dim, split_factor=groups)
    shape = torch.Size(n * mesh.size() if d == dim else n for d, n in enumerate(local.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def cut_sequence(full: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Return a DTensor that is the whole, cut along `dim` in parts of which the last ones may be shorter."""
    local = full.narrow(dim, 0, -(-full.shape[dim] // mesh.size())).contiguous()
    return cut_like(local, mesh, dim, full.shape)


def cut_like(local: Tensor, mesh: DeviceMesh, dim: int, shape: Sequence[int]) -> DTensor:
    """Return a DTensor of this shape, of which this is the first part along `dim`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def rest_of_index(x: DTensor, index: tuple[Any, ...], dim: int) -> Any:
    """Return what else an index asks for, of a tensor whose slice along `dim` is taken already."""
    full = slice(None)
    at, out = 0, list[Any]()
    after = len([i for i in index if i is not None and i is not Ellipsis])
    for i in index:
        if i is Ellipsis:
            skipped = x.ndim - after
            out += [full] * skipped
            at += skipped
            continue
        if i is not None:
            out.append(full if at == dim else i)
            at += 1
        else:
            out.append(None)
    return x[tuple(out)]


def origin_of(x: DTensor, cuts: Mapping[str, Cut], width: int, block: nn.Module) -> str | None:
    """Return the projection whose output this is."""
    columns = [n for n in sources_of(x) if n in cuts and cuts[n].kind == "column"]
    if not columns:
        return None
    shape: Any = getattr(block.get_submodule(columns[-1]), "weight", x).shape
    return columns[-1] if len(columns) == 1 and width in shape else None


def lifted(value: Any, lift: Callable[..., Any], first: str | int) -> Any:
    """Return an argument with its tensors changed; `lift` gets the path, the tensor and the argument's place."""
    if isinstance(value, Tensor):
        return lift((), value, first)
    leaves, spec = tree_flatten_with_path(value)
    return tree_unflatten([lift(path, leaf, first) for path, leaf in leaves], spec)


@final
class SentByTensors(TorchDispatchMode):
    """Mode that counts collectives: DTensor adds them where a call needs more than a part."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again as calls on parts
        self.times += func.namespace in ("_c10d_functional", "c10d", "c10d_functional", "_dtensor")
        return func(*args, **(kwargs or {}))
