"""Machines that the emulator plays: which devices, which of them a process sees, and what of the driver works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SWITCH = "SOFTCUDA"
"""Environment variable with the name of a profile; without it nothing is emulated."""

DEVICES, MEMORY = "SOFTCUDA_DEVICES", "SOFTCUDA_MEMORY"
"""Environment variables with the number of GPUs and the bytes of each, if they are not the profile's."""

GIB = 2**30


@dataclass(frozen=True)
class Profile:
    """One machine: its GPUs are all alike."""

    name: str
    capability: tuple[int, int]
    memory: int
    processors: int
    devices: int = 2
    kind: str = "cuda"
    """Name of the device in torch: cuda, or npu as Ascend's."""
    instances: int = 0
    """MIG instances of each GPU; CUDA shows a process one of them."""
    driver_works: bool = True
    """False: the driver is older than torch's CUDA needs, although NVML counts its GPUs."""
    nvml_works: bool = True
    """False: pynvml finds no NVML."""
    lists_own_process: bool = True
    """False: NVML lists processes by the ids that they have outside of this container."""
    torch_counts: bool = True
    """False: torch's own count by NVML fails, so that it asks CUDA, which spoils forks."""

    @property
    def choice(self) -> str:
        """Environment variable that selects devices."""
        return "ASCEND_RT_VISIBLE_DEVICES" if self.kind == "npu" else "CUDA_VISIBLE_DEVICES"

    def gpu_uuid(self, gpu: int) -> str:
        """Return a GPU's UUID, as NVML writes it."""
        return f"GPU-{gpu + 1:08x}-5c0d-a000-0000-{gpu:012x}"

    def instance_uuid(self, gpu: int, instance: int) -> str:
        """Return the UUID of a MIG instance."""
        return f"MIG-{gpu + 1:08x}-5c0d-a000-{instance + 1:04x}-{gpu:012x}"


A100 = Profile("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB, 108)
H100 = Profile("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 132)
T4 = Profile("Tesla T4", (7, 5), 15 * GIB, 40)
ASCEND = Profile("Ascend910B3", (0, 0), 64 * GIB, 20, kind="npu")

PROFILES = {
    "a100": A100,
    "h100": H100,
    "t4": T4,
    "mig": replace(
        A100, name="NVIDIA A100-SXM4-80GB MIG 2g.20gb", memory=20 * GIB, processors=28, devices=1, instances=3
    ),
    "old-driver": replace(A100, driver_works=False),
    "no-nvml": replace(A100, nvml_works=False, torch_counts=False),
    "no-count": replace(A100, torch_counts=False),
    "container": replace(A100, lists_own_process=False),
    "ascend": ASCEND,
}


def profile_of(environ: Mapping[str, str] = os.environ) -> Profile | None:
    """Return the profile that an environment asks for."""
    name = environ.get(SWITCH)
    if not name:
        return None
    changes: dict[str, Any] = {}
    if devices := environ.get(DEVICES):
        changes["devices"] = int(devices)
    if memory := environ.get(MEMORY):
        changes["memory"] = int(memory)
    return replace(PROFILES[name], **changes)


def visible_devices(profile: Profile, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the UUIDs of devices that a driver shows a process, in its order, up to the first invalid entry."""
    gpus = [profile.gpu_uuid(i) for i in range(profile.devices)]
    choice = environ.get(profile.choice)
    instances = [profile.instance_uuid(g, i) for g in range(profile.devices) for i in range(profile.instances)]
    words = [str(i) for i in range(profile.devices)] if choice is None else [w.strip() for w in choice.split(",")]
    seen: list[str] = []
    for word in words:
        if word.isdecimal() and int(word) < profile.devices:
            uuid = gpus[int(word)]
        elif word.startswith("GPU-") and sum(gpu.startswith(word) for gpu in gpus) == 1:
            (uuid,) = (gpu for gpu in gpus if gpu.startswith(word))
        elif word in instances:
            uuid = word
        else:
            break
        if uuid in seen:
            return []  # a device that is listed twice hides them all
        seen.append(uuid)
    if profile.instances:  # a process has one instance, the first of a GPU that is named as a whole
        return [profile.instance_uuid(gpus.index(uuid), 0) if uuid in gpus else uuid for uuid in seen[:1]]
    return seen
