"""Names in a model's state that a checkpoint tells apart: trained parameters, and buffers not in state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from unipar.model.library_configs import library_configs

if TYPE_CHECKING:
    from torch import nn

    from unipar.config import Config


class StateNames(NamedTuple):
    """Names of one part's state, the first of those that a tensor has; and configs that its modules carry."""

    trained: list[str]
    """Parameters that take gradients."""

    unsaved: list[str]
    """Buffers that are not persistent, so that state dicts do not have them."""

    configs: list[dict[str, Any]]
    """Configs that modules of transformers and peft carry."""


class CheckpointBytes(NamedTuple):
    """Bytes of tensors that checkpoints have."""

    each: int
    """Bytes that each checkpoint has."""

    once: int
    """Bytes of weights that are not trained, which all checkpoints share."""


def state_names(module: nn.Module) -> StateNames:
    """Return the names of a module as its author made it."""
    unsaved = unsaved_buffers(module)
    return StateNames(
        [name for name, p in module.named_parameters() if p.requires_grad],
        [name for name, _ in module.named_buffers() if name in unsaved],
        library_configs(module),
    )


def saves_frozen_once(config: Config, configs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether weights that are not trained are saved once, beside the checkpoints; `configs`: of all parts."""
    wanted = "auto" if config.checkpoint is None else config.checkpoint.frozen
    if wanted != "auto":
        return wanted == "reference"
    return config.model.loading is not None or any(one["adapter"] is not None for one in configs)


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers that are not persistent, each under all of its names."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage] - there is no other way
    }
