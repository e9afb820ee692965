"""Parameters, buffers and plain tensors travel to where they stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from unipar.backend import Part
from unipar.errors import TaskError

PlaceParameter = Callable[[Tensor], Tensor]


def direct_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own, under every name they have: tied ones too."""
    return dict(module._parameters)  # pyright: ignore[reportPrivateUsage]


def direct_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own, saved or not."""
    return dict(module._buffers)  # pyright: ignore[reportPrivateUsage]


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What the user's code keeps on a module besides parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def broadcast_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's values of one tensor, on every rank."""
    if dist.get_rank() == 0:
        there = tensor.detach().to(device).contiguous()
    else:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(there, 0)
    return there


def place_tensors(
    root: nn.Module, place: PlaceParameter, device: torch.device, origin: Mapping[int, nn.Parameter] | None = None
) -> None:
    """Give each parameter, buffer and plain tensor attribute its place; what was tied or shared stays so.

    Tensors in lists, dicts and tuples travel too; lists and dicts are filled in place, as modules may share them.
    `origin` leads from a parameter that somebody still holds to the one that took its place in the modules.
    """
    done: dict[int, Any] = {}
    keep: list[Any] = []  # so that no id is used twice

    def placed(p: nn.Parameter) -> nn.Parameter:
        p = (origin or {}).get(id(p), p)
        if id(p) not in done:
            keep.append(p)
            new = place(p)
            done[id(p)] = new if isinstance(new, nn.Parameter) else nn.Parameter(new, p.requires_grad)
        return done[id(p)]

    def sent(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return placed(value)
        if not isinstance(value, Tensor | list | dict | tuple):
            return value
        if id(value) in done:
            return done[id(value)]
        keep.append(value)
        if isinstance(value, Tensor):
            done[id(value)] = broadcast_tensor(value, device)
        elif isinstance(value, tuple):
            parts = [sent(v) for v in value]
            changed = any(new is not old for new, old in zip(parts, value, strict=True))
            made = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
            done[id(value)] = made if changed else value
        else:
            done[id(value)] = value
            for key, old in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (new := sent(old)) is not old:
                    value[key] = new
        return done[id(value)]

    modules = list(root.modules())
    for module in modules:
        for name, param in direct_parameters(module).items():
            if param is not None:
                setattr(module, name, placed(param))
    for module in modules:
        for name, value in (direct_buffers(module) | plain_attributes(module)).items():
            if (new := sent(value)) is not value:
                setattr(module, name, new)


def cast_buffers(root: nn.Module, dtype: torch.dtype) -> None:
    """Buffers and plain tensors in the dtype that parameters compute in, as their sum would be fp32 otherwise.

    Running statistics stay as they are: they add up small numbers.
    """
    for module in root.modules():
        kept = (
            plain_attributes(module)
            if isinstance(module, _NormBase)
            else plain_attributes(module) | direct_buffers(module)
        )
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(module, name, value.to(dtype))


def broadcast_model(root: nn.Module, device: torch.device) -> None:
    """A whole copy on each rank."""
    place_tensors(root, lambda p: broadcast_tensor(p, device), device)


def refuse_shared_parameters(part: Part, cell: str) -> None:
    """For libraries that split each block by itself: a parameter of two blocks would have two owners."""
    owners: dict[int, str] = {}
    for block in part.blocks:
        for name, p in part.module.get_submodule(block).named_parameters():
            first = owners.setdefault(id(p), block)
            if first != block:
                raise TaskError(
                    f"{cell} splits each block by itself, and {block!r} shares its {name!r} with {first!r}: "
                    "set model.blocks: none, or name blocks that share nothing"
                )


def refuse_scalar_parameters(module: nn.Module, cell: str) -> None:
    """For libraries that cannot split a parameter without dimensions."""
    bare = [name for name, p in module.named_parameters() if p.ndim == 0]
    if bare:
        raise TaskError(
            f"{cell} cannot hold the parameter {bare[0]!r}, which has no dimensions: give it the shape (1,)"
        )
