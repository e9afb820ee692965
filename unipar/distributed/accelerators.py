"""Kinds of accelerators, and the devices that are visible to this process, counted without importing torch here."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from typing_extensions import override

from unipar.distributed import gpus
from unipar.distributed.gpus import DriverSilent

VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator: torch's name of the device, and the names that belong to it."""

    type: str
    name: str
    transport: str
    """Backend of torch.distributed for its tensors."""

    choice: str | None
    """Environment variable that selects devices."""

    noun: str = "GPU"
    can_be_shared: bool = False
    """Whether ranks can share one device: their collectives are gloo's then, which must move its tensors."""

    package: str = ""
    """Package without which Accelerate and DeepSpeed do not find such a device; torch itself asks for none."""


ACCELERATORS: Final = {
    each.type: each
    for each in (
        Accelerator("cuda", "CUDA or ROCm", "nccl", VISIBLE_DEVICES_VARIABLE, can_be_shared=True),
        Accelerator("xpu", "Intel GPU", "xccl", "ZE_AFFINITY_MASK"),
        Accelerator("npu", "Ascend NPU", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "NPU", package="torch_npu"),
        Accelerator("hpu", "Gaudi", "hccl", "HABANA_VISIBLE_MODULES", "HPU", package="habana_frameworks"),
        Accelerator("mps", "Apple GPU", "gloo", None),
    )
}
"""Accelerators by torch's device type. Several processes cannot share `mps`."""

PROBE_SECONDS: Final = 120.0
"""Seconds after which a process that asks torch for its accelerator is given up."""

_PROBE: Final = """
import json, torch
found = torch.accelerator.current_accelerator(check_available=True)
print(json.dumps([found.type, torch.accelerator.device_count()] if found else ["", 0]))
"""


@dataclass(frozen=True)
class VisibleDevices:
    """Devices of one accelerator that are visible to this process."""

    type: str = ""
    """Device type; empty if there are none."""

    count: int = 0

    @override
    def __str__(self) -> str:
        """Return "no GPU", "one GPU" or "4 NPUs"."""
        noun = ACCELERATORS[self.type].noun if self.type else "GPU"
        return f"no {noun}" if not self.count else f"one {noun}" if self.count == 1 else f"{self.count} {noun}s"


def find_visible_devices() -> VisibleDevices:
    """Return the devices of ranks with `device: auto`: CUDA's, else another accelerator's that ranks can share."""
    if number := count_visible_gpus():
        return VisibleDevices("cuda", number)
    from importlib.metadata import entry_points  # slow to import

    other = bool({"hip", "xpu"} & read_torch_builds()) or bool(entry_points(group="torch.backends"))
    return ask_torch() if other else VisibleDevices()


def count_visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of CUDA devices that torch would see in this process; 0 if torch was built without CUDA.

    The driver tells (NVML). Torch is asked, in a process of its own, only if it does not.
    """
    if not torch_has_cuda():
        return 0
    try:
        return count_chosen_gpus(gpus.list_gpu_ids(), environ.get(VISIBLE_DEVICES_VARIABLE))
    except DriverSilent:
        return ask_torch(environ).count if _has_cuda_driver() else 0


def count_chosen_gpus(ids: Sequence[str], choice: str | None) -> int:
    """Return how many of the GPUs a value of CUDA_VISIBLE_DEVICES leaves; CUDA ignores all after an invalid entry.

    Raise DriverSilent if the value begins with a slice of a GPU (MIG): CUDA decides whether that one exists.
    """
    if choice is None:
        return len(ids)
    counted: set[str] = set()
    # the first entry decides on the kind of all; torch ends the list where another follows
    by_number = choice.strip()[:1].isdecimal()
    for word in (w.strip() for w in choice.split(",")):
        if by_number and word.isdecimal() and int(word) < len(ids):
            gpu = ids[int(word)]
        elif not by_number and word.startswith("GPU-"):
            matches = [i for i in ids if i.startswith(word)]
            if len(matches) != 1:
                break
            (gpu,) = matches
        elif word.startswith("MIG-") and not counted:
            raise DriverSilent(f"{VISIBLE_DEVICES_VARIABLE} names a slice of a GPU")
        else:
            break
        if gpu in counted:
            return 0  # CUDA shows no GPU at all if one is listed twice
        counted.add(gpu)
    return len(counted)


def ask_torch(environ: Mapping[str, str] = os.environ) -> VisibleDevices:
    """Return the devices that torch sees in a process of its own; `mps`, which ranks cannot share, counts as none."""
    return _ask_torch(tuple((each.choice, environ.get(each.choice)) for each in ACCELERATORS.values() if each.choice))


@lru_cache
def _ask_torch(choices: tuple[tuple[str, str | None], ...]) -> VisibleDevices:
    chosen = {name: value for name, value in choices if value is not None}
    others = {name: value for name, value in os.environ.items() if name not in dict(choices)}
    command = [sys.executable, "-c", _PROBE]
    try:
        probe = subprocess.run(
            command, env=others | chosen, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return VisibleDevices()
    kind, number = json.loads(probe.stdout.splitlines()[-1])
    return VisibleDevices(kind, number) if number and kind != "mps" else VisibleDevices()


def _has_cuda_driver() -> bool:
    """Return whether CUDA's driver library is there; it is loaded, not initialized, so that a fork may use it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA."""
    return "cuda" in read_torch_builds()


def read_torch_builds() -> set[str]:
    """Return those of cuda, hip and xpu that torch was built with, read from its version file without importing it.

    A torch without a version file counts as built with CUDA, as most are.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return set()
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return {"cuda"}
    values = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE))
    return {name for name, value in values.items() if value != "None"}
