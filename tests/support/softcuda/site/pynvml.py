"""NVML of the emulated machine, in place of nvidia-ml-py's module: what unipar and torch ask it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

from tests.support.softcuda.profiles import Profile, profile_of

CONTEXT_BYTES = 300 << 20
"""What CUDA takes on a device besides tensors."""


class NVMLError(Exception):
    """Any failure of NVML."""


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801 - nvidia-ml-py's name
    """No driver is installed."""


class NVMLError_NotFound(NVMLError):  # noqa: N801 - nvidia-ml-py's name
    """No device has this UUID."""


class NVMLError_InvalidArgument(NVMLError):  # noqa: N801 - nvidia-ml-py's name
    """No device has this index."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801 - nvidia-ml-py's name
    """The device cannot do this."""


def _profile() -> Profile:
    profile = profile_of()
    if profile is None or not profile.nvml_works:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    return profile


def nvmlInit() -> None:  # noqa: N802 - as all of these
    _profile()


def nvmlShutdown() -> None:  # noqa: N802
    _profile()


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "580.65.06" if _profile().driver_works else "470.82.01"


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return _profile().devices


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    if not 0 <= index < _profile().devices:
        raise NVMLError_InvalidArgument("Invalid Argument")
    return index


def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> int:  # noqa: N802
    text, profile = uuid.decode() if isinstance(uuid, bytes) else uuid, _profile()
    for gpu in range(profile.devices):
        if text == profile.gpu_uuid(gpu) or text in [profile.instance_uuid(gpu, i) for i in range(profile.instances)]:
            return gpu
    raise NVMLError_NotFound("Not Found")


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return _profile().gpu_uuid(handle)


def nvmlDeviceGetMigMode(handle: int) -> list[int]:  # noqa: N802
    """Return whether the device is cut into instances: now, and after the next start."""
    if not 0 <= handle < _profile().devices:
        raise NVMLError_InvalidArgument("Invalid Argument")
    if _profile().capability < (8, 0):
        raise NVMLError_NotSupported("Not Supported")
    return [int(_profile().instances > 0)] * 2


def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
    return _profile().name


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:  # noqa: N802
    total, used = _profile().memory, sum(p.usedGpuMemory for p in nvmlDeviceGetComputeRunningProcesses(handle))
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:  # noqa: N802
    """Return this process, if it uses the device: NVML lists them all, and this module knows no other."""
    activation: Any = sys.modules.get("tests.support.softcuda.activation")
    if activation is None or activation.native is None:
        return []
    uuid = nvmlDeviceGetUUID(handle)
    outside = 0 if _profile().lists_own_process else 100_000
    return [
        SimpleNamespace(
            pid=os.getpid() + outside,
            usedGpuMemory=activation.native.statistics(i)["reserved"]["current"] + CONTEXT_BYTES,
        )
        for i, seen in enumerate(activation.visible)
        if seen == uuid and activation.native.has_context(i)
    ]
