"""torch.npu: what torch and unipar ask the module of a device for, with the names that Ascend's torch_npu has."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Self, final

import torch
from torch import Tensor

from tests.support.softcuda import activation
from tests.support.softcuda.cuda_functions import event_class, stream_class
from tests.support.softcuda.npu import memory
from tests.support.softcuda.npu.memory import (
    empty_cache,
    index_of,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats_as_nested_dict,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)

__all__ = [
    "Event",
    "Stream",
    "device",
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats_as_nested_dict",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]

_native: Any = activation.native
_C: Any = vars(torch)["_C"]
_PRIVATE_USE_1 = 20
"""torch's number of the device type."""

_StreamBase: Any = stream_class(_C, "npu")
_EventBase: Any = event_class(_C, _native, "npu")

_Device = torch.device | int | str | None
_initialized_in = 0


# --- devices --------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices that ASCEND_RT_VISIBLE_DEVICES leaves; it may change until the first is used."""
    if not _initialized_in:
        activation.settle_devices()
    return len(activation.visible)


def is_initialized() -> bool:
    """Return whether this process has used a device."""
    return _initialized_in == os.getpid()


def _is_in_bad_fork() -> bool:
    return _initialized_in not in (0, os.getpid())


def _lazy_init() -> None:
    global _initialized_in
    if is_initialized():
        return
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' "
            "start method"
        )
    if not device_count():
        raise RuntimeError("No NPUs are available")
    _initialized_in = os.getpid()


init = _lazy_init


def current_device() -> int:
    """Return the index of the current device."""
    _lazy_init()
    return int(_C._accelerator_getDeviceIndex())


def set_device(device: _Device) -> None:
    """Make a device the current one."""
    _lazy_init()
    _C._accelerator_setDeviceIndex(index_of(device))


def synchronize(device: _Device = None) -> None:
    """Wait until a device has finished all work."""
    _lazy_init()
    _C._accelerator_synchronizeDevice(index_of(device))


@final
class device:  # noqa: N801 - torch's name
    """A context manager: the current device is this one."""

    def __init__(self, device: _Device) -> None:
        self.index, self._before = index_of(device), -1

    def __enter__(self) -> Self:
        self._before = current_device()
        set_device(self.index)
        return self

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


@final
class _Properties:
    """Name and memory of a device; torch_npu tells no UUID."""

    def __init__(self) -> None:
        machine = activation.profile()
        self.name, self.total_memory = machine.name, machine.memory
        self.multi_processor_count = machine.processors


def get_device_properties(device: _Device = None) -> _Properties:
    """Return name and memory of a device."""
    _lazy_init()
    if not 0 <= index_of(device) < device_count():
        raise AssertionError("Invalid device id")
    return _Properties()


def get_device_name(device: _Device = None) -> str:
    """Return the name of a device's model."""
    return get_device_properties(device).name


# --- streams --------------------------------------------------------------------------------------------------------


@final
class Stream(_StreamBase):
    """A stream of a device."""

    def __new__(cls, device: _Device = None, priority: int = 0, **more: Any) -> Any:
        _lazy_init()
        with _on(device):
            return super().__new__(cls, priority=priority, device_type=_PRIVATE_USE_1, **more)


@final
class Event(_EventBase):
    """An event of a device."""

    def record(self, stream: Any = None) -> None:
        """Record the event in a stream, or in the current one."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        """Let a stream, or the current one, wait for the event."""
        super().wait(current_stream() if stream is None else stream)


def current_stream(device: _Device = None) -> Stream:
    """Return the stream that operators go to."""
    _lazy_init()
    return _stream(_C._accelerator_getStream(index_of(device)))


def default_stream(device: _Device = None) -> Stream:
    """Return the stream that operators go to where nobody says otherwise."""
    _lazy_init()
    return Stream(stream_id=0, device_index=index_of(device))


def set_stream(stream: Any) -> None:
    """Let operators go to a stream."""
    if stream is not None:
        _C._accelerator_setStream(stream)


@contextmanager
def stream(stream: Any) -> Generator[None]:
    """Context manager: operators go to a stream."""
    if stream is None:
        yield
        return
    with _on(stream.device):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


def _stream(known: Any) -> Stream:
    return Stream(stream_id=known.stream_id, device_index=known.device_index)


@contextmanager
def _on(device: _Device) -> Generator[None]:
    before = current_device()
    set_device(index_of(device))
    try:
        yield
    finally:
        set_device(before)


# --- random numbers, precision --------------------------------------------------------------------------------------


def get_rng_state(device: _Device = "npu") -> Tensor:
    """Return the state of a device's generator."""
    _lazy_init()
    return _native.default_generator(index_of(device)).get_state()


def set_rng_state(new_state: Tensor, device: _Device = "npu") -> None:
    """Set the state of a device's generator."""
    _lazy_init()
    _native.default_generator(index_of(device)).set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _lazy_init()
    _native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    _lazy_init()
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast can compute in."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """Return True."""
    return True
