"""torch.npu.memory: what its allocator counts, and its history, with the signatures of torch_npu."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.softcuda import activation
from tests.support.softcuda.cuda_functions import memory_functions

__all__ = [
    "_record_memory_history",
    "_snapshot",
    "empty_cache",
    "index_of",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats_as_nested_dict",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]

_C: Any = vars(torch)["_C"]
_functions = memory_functions(activation.native)
_Device = torch.device | int | str | None


def index_of(device: _Device) -> int:
    """Return a device's index; without one, that of the current device."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return int(_C._accelerator_getDeviceIndex()) if index is None else index


def memory_stats_as_nested_dict(device: _Device = None) -> dict[str, Any]:
    """Return the allocator's counters."""
    return _functions["memoryStats"](index_of(device))


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes of tensors."""
    return _counter(device, "allocated_bytes")["current"]


def max_memory_allocated(device: _Device = None) -> int:
    """Return the most bytes of tensors since the peaks were reset."""
    return _counter(device, "allocated_bytes")["peak"]


def memory_reserved(device: _Device = None) -> int:
    """Return the bytes that the allocator has taken from the device."""
    return _counter(device, "reserved_bytes")["current"]


def max_memory_reserved(device: _Device = None) -> int:
    """Return the most bytes that the allocator has had since the peaks were reset."""
    return _counter(device, "reserved_bytes")["peak"]


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Let the peaks begin anew."""
    _functions["resetPeakMemoryStats"](index_of(device))


def empty_cache() -> None:
    """Give back what the allocator keeps for reuse."""
    activation.native.empty_cache()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return free and all bytes of a device."""
    return activation.native.memory_info(index_of(device))


def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
    """Let this process allocate no more than this share of the device's memory."""
    _functions["setMemoryFraction"](fraction, index_of(device))


def memory_snapshot() -> list[Any]:
    """Return the allocator's segments."""
    return _functions["memorySnapshot"](None)["segments"]


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = 0,
    device: _Device = None,
    clear_history: bool = False,
) -> None:
    _functions["record_memory_history"](enabled)


def _snapshot(device: _Device = None) -> dict[str, Any]:
    return _functions["memorySnapshot"](None)


def _counter(device: _Device, name: str) -> dict[str, int]:
    return memory_stats_as_nested_dict(device)[name]["all"]
