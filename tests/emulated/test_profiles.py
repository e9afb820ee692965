"""The emulated machines: which devices a process sees, and what of the driver works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.profiles import A100, PROFILES

LOOK = """
import warnings
import torch
warnings.simplefilter("error")

def ask(question):
    try:
        return question()
    except Exception as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0]}"

def nvml():
    import pynvml
    pynvml.nvmlInit()
    return [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]

result = {
    "count": ask(torch.cuda.device_count),
    "available": ask(torch.cuda.is_available),
    "names": ask(lambda: [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]),
    "uuids": ask(lambda: [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]),
    "capability": ask(torch.cuda.get_device_capability),
    "memory": ask(lambda: torch.cuda.mem_get_info()[1]),
    "bf16": ask(lambda: torch.cuda.is_bf16_supported(including_emulation=False)),
    "nvml": ask(nvml),
}
"""
GPUS = [A100.gpu_uuid(i) for i in range(3)]
UUIDS = [uuid.removeprefix("GPU-") for uuid in GPUS]


def look(emulated: EmulatedDevice, profile: str, choice: str | None = None, **changes: Any) -> dict[str, Any]:
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}  # DeepSpeed sets it when it is imported
    if choice is not None:
        variables["CUDA_VISIBLE_DEVICES"] = choice
    run = emulated.run(LOOK, profile, variables=variables, **changes)
    assert run.result, run.stderr
    return run.result


@pytest.mark.parametrize(
    ("profile", "name", "capability", "gib", "bf16"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", [8, 0], 80, True),
        ("h100", "NVIDIA H100 80GB HBM3", [9, 0], 80, True),
        ("t4", "Tesla T4", [7, 5], 15, False),
    ],
)
def test_gpus(profile: str, name: str, capability: list[int], gib: int, bf16: bool, emulated: EmulatedDevice) -> None:
    """Two devices of a kind, as torch and NVML describe them."""
    assert look(emulated, profile) == {
        "count": 2,
        "available": True,
        "names": [name, name],
        "uuids": UUIDS[:2],
        "capability": capability,
        "memory": gib * 2**30,
        "bf16": bf16,
        "nvml": GPUS[:2],
    }


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("0,0", []),
        (GPUS[2], [2]),
        (f"{GPUS[1][:12]},{GPUS[0]}", [1, 0]),
        ("GPU-ffff", []),
    ],
)
def test_visible_devices(choice: str, seen: list[int], emulated: EmulatedDevice) -> None:
    """Indices and UUIDs, short ones too; all after an invalid entry is hidden, and all if one is listed twice."""
    found = look(emulated, "a100", choice, devices=3)
    assert (found["uuids"], found["available"], found["nvml"]) == ([UUIDS[i] for i in seen], bool(seen), GPUS)


def test_a_device_that_is_chosen_late(emulated: EmulatedDevice) -> None:
    """CUDA reads the variable when it is first asked, not when torch is imported."""
    run = emulated.run(
        "import torch, os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\ntorch.cuda.init()\n"
        "result = [torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)]"
    )
    assert run.result == [1, UUIDS[1]], run.stderr


@pytest.mark.parametrize(("choice", "instance"), [(None, 0), ("0", 0), (PROFILES["mig"].instance_uuid(0, 2), 2)])
def test_a_slice_of_a_gpu(choice: str | None, instance: int, emulated: EmulatedDevice) -> None:
    """Under MIG a process has one instance: the first, or that which it names; NVML counts the GPU."""
    found = look(emulated, "mig", choice)
    uuid = PROFILES["mig"].instance_uuid(0, instance).removeprefix("MIG-")
    assert (found["names"], found["uuids"]) == (["NVIDIA A100-SXM4-80GB MIG 2g.20gb"], [uuid])
    assert (found["memory"], found["nvml"]) == (20 * 2**30, GPUS[:1])


def test_a_driver_that_is_too_old(emulated: EmulatedDevice) -> None:
    """NVML counts its GPUs, and torch has none."""
    found = look(emulated, "old-driver")
    assert (found["count"], found["nvml"]) == (2, GPUS[:2])
    assert found["available"].startswith(
        "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    )
    assert found["names"].startswith("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).")


def test_no_nvml(emulated: EmulatedDevice) -> None:
    """Without it pynvml fails, and torch counts by CUDA."""
    found = look(emulated, "no-nvml")
    assert (found["count"], found["available"], found["names"]) == (2, True, [A100.name] * 2)
    assert found["nvml"] == "NVMLError_LibraryNotFound: NVML Shared Library Not Found"


def test_memory_by_nvml(emulated: EmulatedDevice) -> None:
    """NVML lists this process on the device that it uses, with its reserved memory and CUDA's own."""
    run = emulated.run("""
import os
import pynvml
import torch
pynvml.nvmlInit()
before = len(pynvml.nvmlDeviceGetComputeRunningProcesses(1))
x = torch.zeros(5 * 2**20, dtype=torch.uint8, device="cuda:1")
lists = [pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]
result = [before, len(lists[0]), [(p.pid == os.getpid(), p.usedGpuMemory) for p in lists[1]]]
""")
    assert run.result == [0, 0, [[True, (6 + 300) * 2**20]]], run.stderr
