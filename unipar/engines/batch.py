"""Functions that move batches to a device, cast them, and map over their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` with `change` applied to every tensor; dicts, lists, tuples and dataclasses are rebuilt."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)((k, map_tensors(v, change)) for k, v in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(v, change) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(v, change) for v in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: map_tensors(getattr(batch, f.name), change) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return `batch` with every floating-point tensor cast to `dtype`."""
    return map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on the model's device; an object that has a `to` method is moved by that method."""
    if device.type == "cpu":
        return batch
    if not isinstance(batch, Tensor | dict | list | tuple) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    return map_tensors(batch, lambda t: t.to(device, non_blocking=True))
