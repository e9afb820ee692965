"""Functions that move batches to a device, cast them, and map over their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from copy import copy
from functools import cache
from inspect import Parameter, signature
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
    them, and what is queued from now on waits for them. Only an object that moves itself travels on the stream that
    computes, as its tensors are not known; the host waits if its `to` does not take `non_blocking`.
    """
    if device.type == "cpu":
        return batch
    if not isinstance(batch, Tensor | dict | list | tuple) and callable(getattr(batch, "to", None)):
        return _move_by_itself(batch, device)
    if not copies_on_a_stream(device):
        return map_tensors(batch, lambda t: t.to(device, non_blocking=True))
    copying, computing = _copy_stream(device), torch.accelerator.current_stream(device)
    moved = map_tensors(batch, lambda t: _copy(t, device, copying, computing))
    computing.wait_stream(copying)
    return moved


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def _move_by_itself(batch: Any, device: torch.device) -> Any:
    """Return a batch moved by its own `to`, from pinned memory if it is a mapping or has `pin_memory`."""
    if not _takes_non_blocking(type(batch)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        tensors: MutableMapping[Any, Any] = batch
        batch = copy(tensors)
        batch.update({key: map_tensors(value, _pinned) for key, value in tensors.items()})
    elif callable(pin := getattr(batch, "pin_memory", None)):
        with suppress(RuntimeError):  # tensors on the device, which cannot be pinned
            batch = pin()
    return batch.to(device, non_blocking=True)


@cache
def _takes_non_blocking(kind: type) -> bool:
    """Return whether a class's own `to` takes `non_blocking`, as a tensor's does."""
    parameters = signature(getattr(kind, "to", lambda: None)).parameters.values()
    return any(p.name == "non_blocking" or p.kind is Parameter.VAR_KEYWORD for p in parameters)


def _pinned(t: Tensor) -> Tensor:
    return t.pin_memory() if t.is_cpu and t.layout is torch.strided else t


def _copy(t: Tensor, device: torch.device, copying: torch.Stream, computing: torch.Stream) -> Tensor:
    """Return a tensor on the device; one in host memory is copied on a stream, and kept for the other that uses it."""
    if not t.is_cpu or t.layout is not torch.strided:
        return t.to(device, non_blocking=True)
    with copying:
        moved = t.pin_memory().to(device, non_blocking=True)
    moved.record_stream(computing)
    return moved
