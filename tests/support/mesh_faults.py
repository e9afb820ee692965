"""Faults of ranks that share the work, put into a native engine after it has proved itself."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor, nn
from unipar_mesh.tensor import rewrites
from unipar_mesh.tensor.sum_collectives import leave


def let_each_rank_add_the_bias(engine: Any, blocks: Any) -> None:
    """Let every rank of tensor add a row's bias to its part of the sum."""
    group = engine.world.groups.group("tensor")
    for block in blocks:
        for row in ("out", "down"):
            module: Any = engine.model.get_submodule(f"{block}.{row}")
            del module.forward
            module.register_forward_hook(partial(_added_up, group))


def _added_up(group: Any, module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return leave(out, group)


def leave_tied_gradients_apart(engine: Any) -> None:
    """Let each stage keep its own part of the gradient of what several stages use."""
    engine.finish_reduction = lambda: None


def leave_gradients_of_norms_apart(engine: Any) -> None:
    """Let each rank keep the gradient that its own positions give a norm's parameters."""

    def unsummed(x: Tensor, group: Any) -> Tensor:
        return x

    replace_until_closed(engine, rewrites, "enter", unsummed)


def replace_until_closed(engine: Any, module: ModuleType | type, name: str, value: Any) -> None:
    """Replace a function of a module or class, which other jobs of the process need, until the engine is closed."""
    patch = mock.patch.object(module, name, value)
    patch.start()
    engine.close = patch.stop
