"""Functions that move batches to a device, cast them, and map over their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unipar.distributed.device import copies_on_a_stream


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
    """Return the batch on the model's device; an object that has a `to` method is moved by that method.

    The host does not wait. Copies run on a stream of their own, so that the work that is still queued does not delay
    them, and what is queued from now on waits for them.
    """
    if device.type == "cpu":
        return batch
    if not isinstance(batch, Tensor | dict | list | tuple) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    if not copies_on_a_stream(device):
        return map_tensors(batch, lambda t: t.to(device, non_blocking=True))
    copying, computing = _copy_stream(device), torch.accelerator.current_stream(device)
    moved = map_tensors(batch, lambda t: _copy(t, device, copying, computing))
    computing.wait_stream(copying)
    return moved


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def _copy(t: Tensor, device: torch.device, copying: torch.Stream, computing: torch.Stream) -> Tensor:
    """Return a tensor on the device; one in host memory is copied on a stream, and kept for the other that uses it."""
    if not t.is_cpu or t.layout is not torch.strided:
        return t.to(device, non_blocking=True)
    with copying:
        moved = t.pin_memory().to(device, non_blocking=True)
    moved.record_stream(computing)
    return moved
