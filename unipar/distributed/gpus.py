"""Number of GPUs visible to this process, counted without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def describe_gpu_count(number: int) -> str:
    """Return "no GPU", "one GPU" or "4 GPUs"."""
    return "no GPU" if number == 0 else "one GPU" if number == 1 else f"{number} GPUs"


def count_visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that torch would see in this process; 0 if torch was built without CUDA."""
    if not torch_has_cuda():
        return 0
    return count_chosen_gpus(list_gpu_ids(), environ.get(VISIBLE_DEVICES_VARIABLE))


def count_chosen_gpus(ids: list[str], choice: str | None) -> int:
    """Return how many of the GPUs a value of CUDA_VISIBLE_DEVICES leaves; CUDA ignores all after an invalid entry."""
    if choice is None:
        return len(ids)
    seen: set[str] = set()
    for word in (w.strip() for w in choice.split(",")):
        if word.isdecimal() and int(word) < len(ids):
            gpu = ids[int(word)]
        elif word.startswith("GPU-"):
            matches = [i for i in ids if i.startswith(word)]
            if len(matches) != 1:
                break
            (gpu,) = matches
        elif word.startswith("MIG-"):
            gpu = word  # a slice of a GPU, counted even if it does not exist: CUDA reports that later
        else:
            break
        if gpu in seen:
            return 0  # CUDA shows no GPU at all if one is listed twice
        seen.add(gpu)
    return len(seen)


def list_gpu_ids() -> list[str]:
    """Return the UUIDs of this machine's NVIDIA GPUs in bus order; an empty list if there is no driver."""
    import pynvml  # slow to import, and needed only if torch was built with CUDA

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_gpu_uuid(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def smallest_gpu_memory() -> int:
    """Return the bytes of memory of this machine's smallest NVIDIA GPU; raise OSError if the driver does not say."""
    import pynvml  # as above

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return min(int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, ValueError) as e:
        raise OSError(f"NVML does not say how much memory a GPU has: {e}") from None


def _gpu_uuid(nvml: Any, index: int) -> str:
    try:
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return f"unknown-{index}"


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA, read from torch's version file without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=\n]*=\s*None", text, re.MULTILINE) is None
