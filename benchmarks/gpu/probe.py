"""Facts about this machine, asked in a process of its own: versions, driver, GPUs. It prints them as JSON."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("numpy", "triton", "deepspeed", "accelerate", "pydantic", "pytest", "unipar")


def probe_machine() -> dict[str, Any]:
    """Return versions, GPUs and driver; the GPUs are those that torch can use."""
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {"CUDA of torch": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "versions": versions,
        "gpus": gpus,
        "memory": [torch.cuda.get_device_properties(i).total_memory for i in range(len(gpus))],
        "driver": driver_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
    }


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "" if there is none."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


if __name__ == "__main__":
    print(json.dumps(probe_machine()))
