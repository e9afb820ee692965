"""Birth: one rank makes the model, the others its shape; values travel one tensor at a time to where they belong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from unipar.backend import Part
from unipar.config import Config
from unipar.errors import ConfigError, TaskError
from unipar.precision import born_as
from unipar.seeds import sow
from unipar.world import World

Place = Callable[[Tensor], Tensor]


ONLY = "model"
"""The name of the part where model() returned one module."""


def create_parts(make_model: Callable[[], Any], config: Config, world: World) -> dict[str, nn.Module]:
    """Return the task's parts, mostly one: real on rank 0, on meta elsewhere; same names, shapes and ties on all."""
    sow(config.train.seed)
    parts = parts_of(_made(make_model) if world.rank == 0 else _on_meta(make_model))
    check_names(config, parts)
    wanted = born_as(config.train.precision)
    for module in parts.values():
        # not module.to(): it would take the imaginary part of a complex buffer
        module._apply(partial(floats_to, dtype=wanted))  # pyright: ignore[reportPrivateUsage]
    _agree(parts, world)
    return parts


def parts_of(made: Any) -> dict[str, nn.Module]:
    """What model() returned, by part; one module is a part of its own."""
    if isinstance(made, nn.Module):
        if not any(p.requires_grad for p in made.parameters()):
            raise TaskError("model() has no parameter that requires a gradient: there is nothing to train")
        return {ONLY: made}
    if not isinstance(made, dict):
        raise TaskError(f"model() returned {made!r}; a torch.nn.Module is wanted")
    parts: dict[Any, Any] = made
    if not parts:
        raise TaskError("model() returned no part at all: {}")
    for name, module in parts.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TaskError(f"model() calls a part {name!r}; a word of letters, digits and _ is wanted")
        if not isinstance(module, nn.Module):
            raise TaskError(f"model() returned {module!r} as its part {name!r}; a torch.nn.Module is wanted")
        if not any(p.requires_grad for p in module.parameters()):
            raise TaskError(
                f"model(): the part {name!r} has no parameter that requires a gradient: there is nothing to train "
                "in it; keep it inside the part that uses it"
            )
    _refuse_ties(parts)
    return parts


def _refuse_ties(parts: Mapping[str, nn.Module]) -> None:
    """Each part travels, is split and is stepped by itself."""
    seen: dict[int, str] = {}
    for part, module in parts.items():
        mine = {id(t): f"{part}.{name}" for name, t in (*module.named_parameters(), *module.named_buffers())}
        for key, name in mine.items():
            if key in seen:
                raise TaskError(
                    f"model(): {seen[key]!r} and {name!r} are one tensor; parts are trained apart and can share "
                    "none: keep it in one part, and reach that by run.frozen()"
                )
        seen |= mine


def whole_of(parts: Mapping[str, nn.Module]) -> nn.Module:
    """The parts as one module, by whose names state is known: with the part's first where there are several."""
    return next(iter(parts.values())) if len(parts) == 1 else nn.ModuleDict(dict(parts))


def check_names(config: Config, parts: Mapping[str, nn.Module]) -> None:
    """`train.parts` names what model() returned."""
    for name in config.train.parts:
        if ONLY in parts and len(parts) == 1:
            raise ConfigError(
                f"train.parts.{name}: model() returned one module, which has no parts; say it in train itself"
            )
        if name not in parts:
            raise ConfigError(f"train.parts.{name}: model() returned no part of that name; it has {', '.join(parts)}")


def floats_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _made(make_model: Callable[[], Any]) -> Any:
    with torch.device("cpu"):
        return make_model()


def _on_meta(make_model: Callable[[], Any]) -> Any:
    """Only the shape. A constructor that looks at values cannot run on meta: then it runs for real and is emptied."""
    try:
        with torch.device("meta"):
            return make_model()
    except Exception:  # whatever it is: if it is not for meta's sake, the real run raises it again
        made = _made(make_model)
        return {name: m.to("meta") for name, m in made.items()} if isinstance(made, dict) else made.to("meta")


def _agree(parts: Mapping[str, nn.Module], world: World) -> None:
    """Another model on another rank would hang in the first broadcast."""
    shape: list[Any] = list(parts)
    for module in parts.values():
        shape += [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in module.named_parameters()]
        shape += [(n, tuple(b.shape), str(b.dtype), False) for n, b in module.named_buffers()]
    world.agree(
        "model",
        hashlib.sha256(repr(shape).encode()).hexdigest(),
        lambda _: (
            f"model() made another model on rank {world.rank} than on rank 0: names, shapes and what is trained "
            "must not depend on the rank"
        ),
    )


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own, under every name they have: tied ones too."""
    return dict(module._parameters)  # pyright: ignore[reportPrivateUsage]


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own, saved or not."""
    return dict(module._buffers)  # pyright: ignore[reportPrivateUsage]


_MODULES_OWN = frozenset(vars(nn.Module()))


def plain_of(module: nn.Module) -> dict[str, Any]:
    """What the user's code keeps on a module besides parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in _MODULES_OWN}


def travel(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's values of one tensor, on every rank."""
    if dist.get_rank() == 0:
        there = tensor.detach().to(device).contiguous()
    else:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(there, 0)
    return there


def settle(
    root: nn.Module, place: Place, device: torch.device, origin: Mapping[int, nn.Parameter] | None = None
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
            done[id(value)] = travel(value, device)
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
        for name, param in parameters_of(module).items():
            if param is not None:
                setattr(module, name, placed(param))
    for module in modules:
        for name, value in (buffers_of(module) | plain_of(module)).items():
            if (new := sent(value)) is not value:
                setattr(module, name, new)


def lower(root: nn.Module, dtype: torch.dtype) -> None:
    """Buffers and plain tensors in the dtype that parameters compute in, as their sum would be fp32 otherwise.

    Running statistics stay as they are: they add up small numbers.
    """
    for module in root.modules():
        kept = plain_of(module) if isinstance(module, _NormBase) else plain_of(module) | buffers_of(module)
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(module, name, value.to(dtype))


def arrive(root: nn.Module, device: torch.device) -> None:
    """A whole copy on each rank."""
    settle(root, lambda p: travel(p, device), device)


def refuse_shared(part: Part, cell: str) -> None:
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


def refuse_scalars(module: nn.Module, cell: str) -> None:
    """For libraries that cannot split a parameter without dimensions."""
    bare = [name for name, p in module.named_parameters() if p.ndim == 0]
    if bare:
        raise TaskError(
            f"{cell} cannot hold the parameter {bare[0]!r}, which has no dimensions: give it the shape (1,)"
        )
