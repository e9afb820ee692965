"""Creation of the task's model, with values on rank 0 and on the meta device elsewhere; checks of its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unipar.backend.precision import parameter_dtype
from unipar.config import Config, Strategy
from unipar.distributed.world import World
from unipar.errors import ConfigError, TaskError
from unipar.utils.seeding import seed_all

ONLY_PART = "model"
"""Name of the only part if model() returned one module."""


def create_parts(
    make_model: Callable[[], Any], config: Config, world: World, *, empty: bool = False
) -> dict[str, nn.Module]:
    """Return the task's parts by name: with values on rank 0, on the meta device elsewhere; alike on all ranks.

    `empty`: rank 0 has values of buffers only, if the constructor allows it; its parameters are on the meta device.
    """
    seed_all(config.train.seed)
    made = _create_empty(make_model, config.train.seed) if empty and world.rank == 0 else None
    if made is None:
        made = _create_model(make_model) if world.rank == 0 else _create_on_meta(make_model)
    parts = check_parts(made)
    check_part_names(config, parts)
    for module in parts.values():
        _cast_floats(module, parameter_dtype(config.train.precision))
    _check_same_on_all_ranks(parts, world)
    return parts


def create_on_cpu(make_model: Callable[[], Any], config: Config) -> dict[str, nn.Module]:
    """Return the task's parts by name, with values on the CPU and in the dtypes in which they are trained."""
    parts = check_parts(_create_model(make_model))
    for module in parts.values():
        _cast_floats(module, parameter_dtype(config.train.precision))
    return parts


def check_parts(made: Any) -> dict[str, nn.Module]:
    """Return what model() returned as parts by name; raise TaskError if it cannot be trained."""
    if isinstance(made, nn.Module):
        if not any(p.requires_grad for p in made.parameters()):
            raise TaskError("model() has no parameter that requires a gradient: there is nothing to train")
        return {ONLY_PART: made}
    if not isinstance(made, dict):
        raise TaskError(f"model() returned {made!r}; it must return a torch.nn.Module")
    parts: dict[Any, Any] = made
    if not parts:
        raise TaskError("model() returned no part: {}; return a module, or modules by name")
    for name, module in parts.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TaskError(f"model() calls a part {name!r}; the name must be a word of letters, digits and _")
        if not isinstance(module, nn.Module):
            raise TaskError(f"model() returned {module!r} as its part {name!r}; it must be a torch.nn.Module")
        if not any(p.requires_grad for p in module.parameters()):
            raise TaskError(
                f"model(): the part {name!r} has no parameter that requires a gradient: there is nothing to train "
                "in it; keep it inside the part that uses it"
            )
    _refuse_shared_tensors(parts)
    return parts


def _refuse_shared_tensors(parts: Mapping[str, nn.Module]) -> None:
    """Raise TaskError if two parts share a tensor: each part is sent, split and updated separately."""
    owners: dict[int, str] = {}
    for part, module in parts.items():
        mine = {id(t): f"{part}.{name}" for name, t in (*module.named_parameters(), *module.named_buffers())}
        for key, name in mine.items():
            if key in owners:
                raise TaskError(
                    f"model(): {owners[key]!r} and {name!r} are one tensor; parts are trained separately and "
                    "cannot share tensors: keep it in one part, and use that part through run.frozen()"
                )
        owners |= mine


def combine_parts(parts: Mapping[str, nn.Module]) -> nn.Module:
    """Return the parts as one module; with several parts, names of its state begin with the part's name."""
    return next(iter(parts.values())) if len(parts) == 1 else nn.ModuleDict(dict(parts))


def check_part_names(config: Config, parts: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if `train.parts` names a part that model() did not return."""
    for name in config.train.parts:
        if ONLY_PART in parts and len(parts) == 1:
            raise ConfigError(
                f"train.parts.{name}: model() returned one module, which has no parts; set it in train itself"
            )
        if name not in parts:
            raise ConfigError(f"train.parts.{name}: model() returned no part of that name; it has {', '.join(parts)}")


def _cast_floats(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers to `dtype`, but for those that `narrow_frozen_parameters` returns."""
    kept = {id(p) for p in narrow_frozen_parameters(module, dtype)}

    def cast(t: Tensor) -> Tensor:
        return t if id(t) in kept else cast_if_float(t, dtype)

    # not module.to(): it would drop the imaginary part of a complex buffer
    module._apply(cast)  # pyright: ignore[reportPrivateUsage]


def narrow_frozen_parameters(module: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the frozen parameters that keep their dtype, as bf16 below fp32 adapters, if others have `dtype`.

    They have a narrower dtype than all that is trained: the author has made them so. A model that is narrow as a whole,
    as a file of weights may be, is cast as a whole; and nothing stays narrow in fp64, by which others are measured.
    """
    floats = [p for p in module.parameters() if p.is_floating_point()]
    trained = min((p.dtype.itemsize for p in floats if p.requires_grad), default=0)
    if dtype == torch.float64:
        return []
    return [p for p in floats if not p.requires_grad and p.dtype.itemsize < min(trained, dtype.itemsize)]


def cast_if_float(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor as `dtype`, any other unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def devices_by_hand(module: nn.Module, device: torch.device) -> list[torch.device]:
    """Return the devices over which the model's author has spread it, or [] if all of it is on one device.

    What is on the CPU counts as on `device`, the run's own, to which it will be moved.
    """
    tensors = chain(module.parameters(), module.buffers())
    devices = {device_in_place(t, device) for t in tensors if t.device.type != "meta"}
    return sorted(devices, key=str) if len(devices) > 1 else []


def device_in_place(tensor: Tensor, device: torch.device) -> torch.device:
    """Return where a tensor stays in a model that its author has spread over devices: the CPU's go to `device`."""
    return device if tensor.device.type == "cpu" else tensor.device


def refuse_devices_by_hand(module: nn.Module, device: torch.device, strategy: Strategy) -> None:
    """Raise TaskError if the model's author has spread it over devices: only one process trains it as it is."""
    if devices := devices_by_hand(module, device):
        names = ", ".join(map(str, devices))
        raise TaskError(
            f"model() spreads its parameters over {len(devices)} devices ({names}), and {strategy} places them itself: "
            f"set backend: single, which trains such a model as it is in one process; or take the devices out of "
            f"model() and its forward, and set parallel.pipeline: {len(devices)}, which cuts any model into stages"
        )


def _create_model(make_model: Callable[[], Any]) -> Any:
    with torch.device("cpu"):
        return make_model()


def _create_empty(make_model: Callable[[], Any], seed: int) -> Any:
    """Create the model on the CPU, with each parameter moved to the meta device as soon as its module has it.

    Return None if that does not give the model without its parameters' values: the constructor fails, makes other
    tensors from parameters, or draws other random numbers, which then are not those that it draws otherwise.
    """
    moved = WeakIdKeyDictionary()  # one parameter of several modules stays one
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if param not in moved:
                if type(param) is not nn.Parameter:
                    raise TypeError(f"{type(param).__name__} cannot be made again without values")
                moved[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                moved[param].__dict__.update(param.__dict__)  # marks that groups() may look at
            param = moved[param]
        register(self, name, param)

    drawn = torch.get_rng_state()
    nn.Module.register_parameter = register_empty
    try:
        made = _create_model(make_model)
    except Exception:  # an error that is not caused by this is raised again with values
        made = None
    finally:
        nn.Module.register_parameter = register
    if made is not None and torch.equal(drawn, torch.get_rng_state()) and not _lacks_values(made):
        return made
    seed_all(seed)
    return None


def _lacks_values(made: Any) -> bool:
    """Return whether a buffer, or another tensor that modules keep, is on the meta device; parameters do not count."""
    parts: list[Any] = list(made.values()) if isinstance(made, dict) else [made]
    left: list[Any] = [vars(module) for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    visited: set[int] = set()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            if value.device.type == "meta" and not isinstance(value, nn.Parameter):
                return True
        elif isinstance(value, dict | list | tuple) and id(value) not in visited:
            visited.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return False


def _create_on_meta(make_model: Callable[[], Any]) -> Any:
    """Create the model on the meta device, or on the CPU first if its constructor needs values."""
    try:
        with torch.device("meta"):
            return make_model()
    except Exception:  # an error that is not caused by meta is raised again on the CPU
        model = _create_model(make_model)
        for module in model.values() if isinstance(model, dict) else [model]:
            if isinstance(module, nn.Module):
                _move_to_meta(module)
        return model


def _move_to_meta(module: nn.Module) -> None:
    """Move all tensors to the meta device; a parameter of several modules stays one, as it would not by `to` alone."""
    places = [(own, key, p) for own in (vars(m)["_parameters"] for m in module.modules()) for key, p in own.items()]
    module.to("meta")
    moved: dict[int, Any] = {}
    for parameters, key, old in places:
        parameters[key] = moved.setdefault(id(old), parameters[key]) if old is not None else None


def _check_same_on_all_ranks(parts: Mapping[str, nn.Module], world: World) -> None:
    """Raise unless all ranks have the same model: otherwise ranks would hang in the first broadcast."""
    shape: list[Any] = list(parts)
    for module in parts.values():
        shape += [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in module.named_parameters()]
        shape += [(n, tuple(b.shape), str(b.dtype), False) for n, b in module.named_buffers()]
    world.agree(
        "model",
        hashlib.sha256(repr(shape).encode()).hexdigest(),
        lambda _: (
            f"model() returned a different model on rank {world.rank} than on rank 0: names, shapes and what is "
            "trained must not depend on the rank"
        ),
    )
