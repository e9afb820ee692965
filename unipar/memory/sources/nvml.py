"""Memory of this process on a GPU as the driver counts it (NVML), CUDA's context and NCCL's buffers included."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


def query_bytes_used(uuid: str) -> tuple[int | None, str]:
    """Return the bytes of this process on the GPU `uuid` and ""; or None and the reason."""
    import pynvml  # here: needed only in workers on CUDA

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as e:
        return None, f"NVML failed: {e}"
    return bytes_of_process(processes, os.getpid())


def bytes_of_process(processes: Iterable[Any], pid: int) -> tuple[int | None, str]:
    """Return the bytes of process `pid` among all processes on a GPU and ""; or None and the reason."""
    sizes = [process.usedGpuMemory for process in processes if process.pid == pid]
    if not sizes:
        return None, f"NVML does not list process {pid}: in a container it shows other process ids"
    if None in sizes:
        return None, "NVML does not report the memory of each process on this machine"
    return sum(sizes), ""
