"""Placement of parameters, buffers and plain tensors on their ranks and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from unipar.backend import Part, Region
from unipar.backend.file_values import file_values
from unipar.errors import TaskError

PlaceParameter = Callable[[Tensor], Tensor]


def direct_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters under every name they have, tied ones included."""
    return dict(module._parameters)  # pyright: ignore[reportPrivateUsage]


def direct_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers, persistent or not."""
    return dict(module._buffers)  # pyright: ignore[reportPrivateUsage]


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the user's code set on a module, without parameters, buffers and submodules."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def broadcast_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's values of `tensor`, on `device`; every rank calls it."""
    if dist.get_rank() == 0:
        if (values := file_values(tensor)) is None:
            result = tensor.detach().to(device).contiguous()
        else:
            result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            values.read_into(Region(0, tensor.numel()), result)
    else:
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(result, 0)
    return result


def place_tensors(
    root: nn.Module,
    place: PlaceParameter,
    device: torch.device | Callable[[Tensor], torch.device],
    origin: Mapping[int, nn.Parameter] | None = None,
) -> None:
    """Place each parameter by `place`, and broadcast each buffer and plain tensor; tied or shared ones stay so.

    Tensors in lists, dicts and tuples are placed too; lists and dicts are changed in place, as modules may share them.
    `device` is that of buffers and plain tensors, or a function that returns it for each.
    `origin` maps the id of a parameter that was replaced, but may still be referenced, to its replacement in `root`.
    """
    done: dict[int, Any] = {}
    keep: list[Any] = []  # references, so that Python gives no id to a second object

    def place_parameter(p: nn.Parameter) -> nn.Parameter:
        p = (origin or {}).get(id(p), p)
        if id(p) not in done:
            keep.append(p)
            new = place(p)
            new = new if isinstance(new, nn.Parameter) else nn.Parameter(new, p.requires_grad)
            done[id(p)] = done[id(new)] = new  # recurrent layers list their parameters again, as they are set
        return done[id(p)]

    def place_value(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return place_parameter(value)
        if not isinstance(value, Tensor | list | dict | tuple):
            return value
        if id(value) in done:
            return done[id(value)]
        keep.append(value)
        if isinstance(value, Tensor):
            done[id(value)] = broadcast_tensor(value, device(value) if callable(device) else device)
        elif isinstance(value, tuple):
            parts = [place_value(v) for v in value]
            changed = any(new is not old for new, old in zip(parts, value, strict=True))
            rebuilt = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
            done[id(value)] = rebuilt if changed else value
        else:
            done[id(value)] = value
            for key, old in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (new := place_value(old)) is not old:
                    value[key] = new
        return done[id(value)]

    modules = list(root.modules())
    for module in modules:
        for name, param in direct_parameters(module).items():
            if param is not None:
                setattr(module, name, place_parameter(param))
    for module in modules:
        for name, value in (direct_buffers(module) | plain_attributes(module)).items():
            if (new := place_value(value)) is not value:
                setattr(module, name, new)


def replace_parameters(root: nn.Module, change: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by `change` of it, tied ones by the same."""
    done: dict[int, nn.Parameter] = {}
    keep: list[nn.Parameter] = []  # references, so that Python gives no id to a second object
    for module in root.modules():
        for name, p in direct_parameters(module).items():
            if p is not None:
                if id(p) not in done:
                    keep.append(p)
                    done[id(p)] = change(p)
                setattr(module, name, done[id(p)])


def cast_buffers(root: nn.Module, dtype: torch.dtype) -> None:
    """Cast buffers and plain tensors to `dtype`, in which parameters compute: a sum with an fp32 tensor would be fp32.

    Running statistics of normalization layers keep their dtype: they sum small numbers.
    """
    for module in root.modules():
        tensors = (
            plain_attributes(module)
            if isinstance(module, _NormBase)
            else plain_attributes(module) | direct_buffers(module)
        )
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(module, name, value.to(dtype))


def broadcast_model(root: nn.Module, device: torch.device) -> None:
    """Give every rank a whole copy of rank 0's model."""
    place_tensors(root, lambda p: broadcast_tensor(p, device), device)


def refuse_shared_parameters(part: Part, strategy: str) -> None:
    """Raise TaskError if two blocks share a parameter: a library that splits block by block would split it twice."""
    owners: dict[int, str] = {}
    for block in part.blocks:
        for name, p in part.module.get_submodule(block).named_parameters():
            first = owners.setdefault(id(p), block)
            if first != block:
                raise TaskError(
                    f"{strategy} splits each block by itself, and {block!r} shares its {name!r} with {first!r}: "
                    "set model.blocks: none, or name blocks that share nothing"
                )


def refuse_scalar_parameters(module: nn.Module, strategy: str) -> None:
    """Raise TaskError if a parameter has no dimensions: some libraries cannot split it."""
    scalars = [name for name, p in module.named_parameters() if p.ndim == 0]
    if scalars:
        raise TaskError(
            f"{strategy} cannot hold the parameter {scalars[0]!r}, which has no dimensions: give it the shape (1,)"
        )
