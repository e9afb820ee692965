"""What the driver counts for a process on a GPU: all of it, CUDA's context and NCCL's buffers too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


def query_bytes_used(uuid: str) -> tuple[int | None, str]:
    """Return the bytes of this process on that GPU; or None, and why."""
    import pynvml  # the worker's side, on CUDA only

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as e:
        return None, f"NVML says: {e}"
    return bytes_of_process(processes, os.getpid())


def bytes_of_process(processes: Iterable[Any], pid: int) -> tuple[int | None, str]:
    """Its bytes among those of all processes on a GPU."""
    found = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not found:
        return None, f"NVML does not know process {pid}: in a container it counts processes by other numbers"
    if None in found:
        return None, "NVML does not say how much each process uses on this machine"
    return sum(found), ""
