"""GPUs visible to this process, counted without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def describe_gpu_count(number: int) -> str:
    return "no GPU" if number == 0 else "one GPU" if number == 1 else f"{number} GPUs"


def count_visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that CUDA would show to torch here; 0 where torch was built without CUDA."""
    if not torch_has_cuda():
        return 0
    return count_chosen_gpus(list_gpu_ids(), environ.get(VISIBLE_DEVICES_VARIABLE))


def count_chosen_gpus(ids: list[str], choice: str | None) -> int:
    """How many of the GPUs a CUDA_VISIBLE_DEVICES leaves: it ends at the first entry that is none of them."""
    if choice is None:
        return len(ids)
    seen: set[str] = set()
    for word in (w.strip() for w in choice.split(",")):
        if word.isdecimal() and int(word) < len(ids):
            one = ids[int(word)]
        elif word.startswith("GPU-"):
            matches = [i for i in ids if i.startswith(word)]
            if len(matches) != 1:
                break
            (one,) = matches
        elif word.startswith("MIG-"):
            one = word  # a slice of a GPU; whether it exists, CUDA will say
        else:
            break
        if one in seen:
            return 0  # CUDA shows nothing at all then
        seen.add(one)
    return len(seen)


def list_gpu_ids() -> list[str]:
    """Return the UUIDs of this machine's NVIDIA GPUs, in the order of their bus; none without a driver."""
    import pynvml  # takes a while, and is needed only where torch was built with CUDA

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


def _gpu_uuid(nvml: Any, index: int) -> str:
    try:
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return f"unknown-{index}"


def torch_has_cuda() -> bool:
    """Whether the torch installed here was built with CUDA: its version file says so, without an import."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        said = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=\n]*=\s*None", said, re.MULTILINE) is None
