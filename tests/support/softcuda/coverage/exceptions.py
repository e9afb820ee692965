"""Device lines that no test executes on the emulated device, and why."""

from __future__ import annotations

from collections.abc import Mapping

MPS = "mps is on Apple's machines alone"
ROCM = "a torch that is built for ROCm"
XPU = "a torch that is built for Intel's GPUs"
KERNELS = "torch's profiler records no kernels here: the emulated device has none"
DRIVER = "the emulator answers in the driver's place"
NVML = "NVML fails or answers so on some machines alone: tests without a device play it"
CPU_ADAM = "DeepSpeed's CPU Adam for CUDA is compiled with CUDA's toolkit"

EXCEPTIONS: Mapping[str, Mapping[str, str]] = {
    "backends/unipar_deepspeed/offload.py": dict.fromkeys(
        (
            *("if type(optimizer) not in", "return optimizer", "keep_compiled_ops", "taken = ", "groups: "),
            "return DeepSpeedCPUAdam",
        ),
        CPU_ADAM,
    ),
    "backends/unipar_deepspeed/options.py": {"count_visible_gpus() > 0": "`offload_optimizer: disk` needs CPU Adam"},
    "unipar/comparison/request.py": {
        "return ({}, f\"the host's": "a machine without a compiler, which has no emulated device"
    },
    "unipar/distributed/accelerators.py": dict.fromkeys(
        ("try:\n    ctypes.CDLL", "ctypes.CDLL", "return False", "return True"), DRIVER
    ),
    "unipar/distributed/device.py": {
        **dict.fromkeys(
            (
                *("if not torch.backends.mps", "raise DeviceUnusable('torch has no mps", "return torch.device('mps')"),
                *("return 'mps'", "torch.mps.", "total = torch.mps", "return (total - torch.mps"),
            ),
            MPS,
        ),
        **dict.fromkeys(("if torch.version.hip", "return f'ROCm"), ROCM),
    },
    "unipar/distributed/gpus.py": dict.fromkeys(
        (*("raise DriverSilent(f'NVML does not list", "raise OSError(f'{unknown}", "return f'unknown-"),),
        NVML,
    ),
    "unipar/engines/batch.py": {"return map_tensors(batch, lambda t: t.to(device, non_blocking=True))": MPS},
    "unipar/memory/recording/watcher.py": dict.fromkeys(
        ("self._pinned = None", "self._notes.append(f'pinned host memory was not recorded"),
        "torch's count of pinned memory fails, which it does on no device that counts it",
    ),
    "unipar/memory/sources/nvml.py": dict.fromkeys(
        ("return (None, f'NVML does not list process", "return (None, 'NVML does not report"), NVML
    ),
    "unipar/profiling/observer.py": dict.fromkeys(
        (
            *(
                "return True",
                "try:\n    self._world.synchronize()\n    self._profile.__exit__",
                "self._world.synchronize",
            ),
            *("self._profile.__exit__", "spans = ", "self._note(f\"waiting was not measured: torch's profiler failed"),
            *("return None", "found = seconds", "if found is None", "self._note('waiting was not measured: no kernel"),
            *("return found", "KERNEL_METHOD"),
        ),
        KERNELS,
    ),
    "unipar/profiling/waiting.py": dict.fromkeys(
        ("listed = ", "sent = ", "if not sent", "return ", "computed = "), KERNELS
    ),
}
"""Reasons by the file and the beginning of a statement or an arm, as `ast.unparse` writes it."""
