"""Device lines that no test executes on the emulated device, and why."""

from __future__ import annotations

from collections.abc import Mapping

MPS = "mps is on Apple's machines alone"
ROCM = "a torch that is built for ROCm"
KERNELS = "torch's profiler records no kernels: the emulated device has none"
DRIVER = "the emulator answers in the place of the driver's library"
NVML = "NVML fails or answers so on some machines alone; tests without a device play it"
EXPORTED = "it runs beside an exported script, where nothing is recorded: test_an_exported_pipeline_with_dropout"
CPU_ADAM = "DeepSpeed compiles its CPU Adam for CUDA with CUDA's toolkit"

EXCEPTIONS: Mapping[str, Mapping[str, str]] = {
    "backends/unipar_deepspeed/offload.py": {
        "if type(optimizer) not in (Adam, AdamW)": CPU_ADAM,
        "return optimizer": CPU_ADAM,
        "keep_compiled_ops()": CPU_ADAM,
        "taken = ": CPU_ADAM,
        "groups: ": CPU_ADAM,
        "return DeepSpeedCPUAdam(": CPU_ADAM,
    },
    "backends/unipar_deepspeed/options.py": {"count_visible_gpus() > 0": CPU_ADAM},
    "backends/unipar_mesh/scripts/mesh_stages.py": {
        "return torch.get_device_module(device).get_rng_state(device)": EXPORTED,
        "torch.get_device_module(state.device).set_rng_state(state.cpu()": EXPORTED,
    },
    "unipar/distributed/accelerators.py": {
        "try:\n    ctypes.CDLL('libcuda.so.1')": DRIVER,
        "ctypes.CDLL('libcuda.so.1')": DRIVER,
        "return False": DRIVER,
        "return True": DRIVER,
    },
    "unipar/distributed/device.py": {
        "if not torch.backends.mps.is_available()": MPS,
        "raise DeviceUnusable('torch has no mps here')": MPS,
        "return torch.device('mps')": MPS,
        "return 'mps'": MPS,
        "torch.mps.": MPS,
        "total = torch.mps.": MPS,
        "return (total - torch.mps.": MPS,
        "if torch.version.hip": ROCM,
        "return f'ROCm": ROCM,
    },
    "unipar/distributed/gpus.py": {
        "raise DriverSilent(f'NVML does not list GPUs": NVML,
        "raise OSError(f'{unknown}": NVML,
        "return f'unknown-": NVML,
    },
    "unipar/engines/batch_transfer.py": {"return map_tensors(batch, lambda t: t.to(device, non_blocking=True))": MPS},
    "unipar/memory/sources/nvml.py": {"return (None, 'NVML does not report the memory of each process": NVML},
    "unipar/profiling/observer.py": {
        "return True": KERNELS,
        "try:\n    self._world.synchronize()\n    self._profile.__exit__": KERNELS,
        "self._world.synchronize()": KERNELS,
        "self._profile.__exit__": KERNELS,
        "spans = ": KERNELS,
        "self._note(f\"waiting was not measured: torch's profiler failed": KERNELS,
        "return None": KERNELS,
        "exposed = seconds_not_hidden(spans)": KERNELS,
        "if exposed is None": KERNELS,
        "self._note('waiting was not measured: no kernel of NCCL ran')": KERNELS,
        "return exposed": KERNELS,
        "KERNEL_METHOD": KERNELS,
    },
    "unipar/profiling/waiting.py": {
        "listed = ": KERNELS,
        "sent = ": KERNELS,
        "if not sent": KERNELS,
        "return ": KERNELS,
        "computed = ": KERNELS,
    },
}
"""Reasons by the file and the beginning of a statement or an arm, as `ast.unparse` writes it."""
