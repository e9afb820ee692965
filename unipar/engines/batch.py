"""Move, cast and walk batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`batch` with every tensor in it changed; containers of the usual kinds are rebuilt."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)((k, map_tensors(v, change)) for k, v in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(v, change) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(v, change) for v in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = {f.name: map_tensors(getattr(batch, f.name), change) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **made)
    return batch


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch where the model is; an object with its own `to` is asked to move itself."""
    if device.type == "cpu":
        return batch
    if not isinstance(batch, Tensor | dict | list | tuple) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    return map_tensors(batch, lambda t: t.to(device, non_blocking=True))
