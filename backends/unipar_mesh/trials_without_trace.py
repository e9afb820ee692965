"""Trials that leave no trace: the model, the task and random numbers are afterwards as before."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unipar.backend import Fn
from unipar.engines.placement import plain_attributes
from unipar.utils.seeding import kept_random_state


@contextmanager
def kept_attributes(owners: Sequence[Any]) -> Generator[None]:
    """Context manager: afterwards these objects have the same attributes, and lists and dicts in them their content."""
    kept = [(owner, _attributes(owner)) for owner in owners if hasattr(owner, "__dict__")]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, values in kept:
        _copy_contents(list(values.values()), contents)
    try:
        yield
    finally:
        for owner, values in kept:
            for name in _attributes(owner).keys() - values.keys():
                delattr(owner, name)
            vars(owner).update(values)
        _restore_contents(contents)


def _attributes(owner: Any) -> dict[str, Any]:
    return plain_attributes(owner) if isinstance(owner, nn.Module) else dict(vars(owner))


def _copy_contents(values: Sequence[Any], contents: dict[int, tuple[Any, Any]]) -> None:
    """Add each list and dict among the values, and inside them, with a copy of its content."""
    for value in values:
        if isinstance(value, list | dict) and id(value) not in contents:
            contents[id(value)] = value, value.copy()
            _copy_contents(list(value.values() if isinstance(value, dict) else value), contents)


def _restore_contents(contents: dict[int, tuple[Any, Any]]) -> None:
    for container, content in contents.values():
        container.clear()
        container.update(content) if isinstance(container, dict) else container.extend(content)


@contextmanager
def unchanged(model: nn.Module, fn: Fn) -> Generator[None]:
    """Context manager: afterwards the model is as before, and so are random numbers.

    That is its buffers, `requires_grad`, modes, hooks, and what its code and the task's keep, lists and dicts included.
    """
    hooks: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():  # a model that installs them in its first call notes that in an attribute
        _copy_contents([value for name, value in vars(module).items() if "_hooks" in name], hooks)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    learns = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with kept_random_state(), kept_attributes([*model.modules(), getattr(fn, "__self__", None)]):
            yield
    finally:
        _restore_contents(hooks)
        for p, wanted in learns:
            p.requires_grad_(wanted)
            p.grad = None
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def modules_not_fused() -> Generator[None]:
    """Context manager: without gradients, too, torch's attention and encoder layers run their modules.

    In evaluation mode they would call one kernel with the weights as they are, of which a rank has parts.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
