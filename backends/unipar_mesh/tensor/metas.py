"""Copies on the meta device: a block without its values, and the arguments of a call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def meta_block(block: nn.Module) -> nn.Module:
    """Return a copy of a block without values, and without what recomputes, compiles or offloads its forward."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        for _, p in module.named_parameters(recurse=False):
            if id(p) not in memo:
                memo[id(p)] = nn.Parameter(_meta(p.detach()), requires_grad=p.requires_grad)
        for _, b in module.named_buffers(recurse=False):
            memo.setdefault(id(b), _meta(b.detach()))
    copied = copy.deepcopy(block, memo)
    for module in copied.modules():
        forward: Any = module.__dict__.get("forward")
        if hasattr(forward, "unipar_inner") or hasattr(forward, "_torchdynamo_orig_callable"):
            del module.__dict__["forward"]  # it would call the original's modules
    return copied


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def meta_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradients: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of a call's arguments whose tensors have no values.

    Which tensors take gradients is kept; if none does, all of floating point are taken to do so, unless
    `gradients` is False.
    """
    tensors = list[Tensor]()
    memo: dict[int, Any] = {}
    copied: Any = _copied((args, dict(kwargs)), memo, tensors)
    floats = [t for t in tensors if t.is_floating_point()]
    if gradients and not any(t.requires_grad for t in floats):
        for t in floats:
            t.requires_grad_(True)
    return copied


def _copied(value: Any, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, Tensor):
        made = _meta(value.detach())
        if value.is_floating_point() and value.requires_grad:
            made.requires_grad_(True)
        tensors.append(made)
    elif isinstance(value, dict):
        made = copy.copy(value)
        made.update({k: _copied(v, memo, tensors) for k, v in value.items()})
    elif isinstance(value, list):
        made = [_copied(v, memo, tensors) for v in value]
    elif isinstance(value, tuple):
        parts = [_copied(v, memo, tensors) for v in value]
        made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
        made = copy.copy(value)  # a cache of keys and values, for example: it must not keep what a trial computes
        memo[id(value)] = (value, made)
        made.__dict__.update({k: _copied(v, memo, tensors) for k, v in value.__dict__.items()})
    else:
        made = value
    memo[id(value)] = (value, made)
    return made
