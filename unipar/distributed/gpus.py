"""NVIDIA's GPUs as the driver counts them (NVML), without torch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class DriverSilent(Exception):
    """NVML does not say which GPUs CUDA has."""


def list_gpu_ids() -> list[str]:
    """Return the UUIDs of this machine's NVIDIA GPUs in bus order.

    Raise DriverSilent if NVML fails, and if a GPU is in MIG mode: CUDA then shows one slice, which NVML does not name.
    """
    with _nvml() as nvml:
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as e:
            raise DriverSilent(f"NVML does not list GPUs: {e}") from None
        if any(_in_mig_mode(nvml, handle) for handle in handles):
            raise DriverSilent("a GPU is in MIG mode")
        return [_gpu_uuid(nvml, handle, i) for i, handle in enumerate(handles)]


def smallest_gpu_memory() -> int:
    """Return the bytes of memory of this machine's smallest NVIDIA GPU; raise OSError if the driver does not say."""
    unknown = "NVML does not say how much memory a GPU has"
    try:
        with _nvml() as nvml:
            try:
                handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
                return min(int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
            except (nvml.NVMLError, ValueError) as e:
                raise OSError(f"{unknown}: {e}") from None
    except DriverSilent as e:
        raise OSError(f"{unknown}: {e}") from None


@contextmanager
def _nvml() -> Generator[Any]:
    """Context manager: yield the module of NVML, initialized; raise DriverSilent if there is no driver."""
    import pynvml  # slow to import, and needed only if torch was built with CUDA

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        raise DriverSilent(f"NVML does not start: {e}") from None
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # most GPUs have no such mode


def _gpu_uuid(nvml: Any, handle: Any, index: int) -> str:
    try:
        return nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError:
        return f"unknown-{index}"
