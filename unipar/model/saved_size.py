"""Size of what a checkpoint holds of a model, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unipar.optimizers.block_states import block_tensors


def frozen_bytes(module: nn.Module, *, fp64: bool) -> int:
    """Return the bytes of the parameters that are not trained."""
    frozen = [p for p in module.parameters() if not p.requires_grad]
    return sum(p.numel() * (8 if fp64 and p.is_floating_point() else p.element_size()) for p in frozen)


def saved_bytes(module: nn.Module, optimizer: Callable[[Any], Optimizer], *, fp64: bool) -> int | None:
    """Return how many bytes a checkpoint has of a model: weights, buffers and the optimizer's state of each weight.

    The optimizer takes a step on parameters that have no values; None if it needs values.
    """

    def described(t: Tensor) -> Tensor:
        dtype = torch.float64 if fp64 and t.is_floating_point() else t.dtype
        return torch.empty(t.shape, dtype=dtype, device="meta")

    parameters = {name: nn.Parameter(described(p), p.requires_grad) for name, p in module.named_parameters()}
    for p in parameters.values():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        made = optimizer(SimpleNamespace(named_parameters=parameters.items))
        made.step()
    except (NotImplementedError, RuntimeError):
        return None
    tensors: list[Tensor] = [*parameters.values(), *map(described, module.buffers())]
    for value in (value for state in made.state.values() for value in state.values() if isinstance(value, Tensor)):
        tensors += block_tensors(value) or [value]
    return sum(t.numel() * t.element_size() for t in tensors)
