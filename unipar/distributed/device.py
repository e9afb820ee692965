"""The device of a rank, whichever accelerator it is: memory, random numbers, synchronization.

All that is particular to an accelerator goes through this file or through `torch.get_device_module`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unipar.distributed.accelerators import ACCELERATORS


class DeviceUnusable(Exception):
    """Torch cannot use a device in this process; the text says why."""


def has_own_memory(device: torch.device) -> bool:
    """Return whether a device is an accelerator: it computes asynchronously, in memory of its own."""
    return device.type != "cpu"


def copies_on_a_stream(device: torch.device) -> bool:
    """Return whether a device copies pinned memory while it computes; mps has neither streams nor memory to pin."""
    return device.type not in ("cpu", "mps")


def select_device(kind: str, local_rank: int) -> torch.device:
    """Return the device `kind` ("cuda", "cuda:1") for a rank of this machine and make it the process's current one.

    A process that sees one device of several ranks' uses that one. Raise DeviceUnusable if torch cannot use it.
    """
    name, _, index = kind.partition(":")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceUnusable("torch has no mps here")
        return torch.device("mps")
    try:
        module: Any = torch.get_device_module(name)
        count = module.device_count()
        place = int(index) if index else 0 if count == 1 else local_rank
        if place >= count:
            torch.empty(0, device=name)  # says why there is none: an old driver, a torch for the CPU
            raise DeviceUnusable(f"torch sees {count} of them, and this rank needs number {place}")
        device = torch.device(name, place)
        module.set_device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ModuleNotFoundError, AttributeError) as e:
        raise DeviceUnusable(str(e).partition("\n")[0]) from None
    return device


def when_context_is_made(kind: str, local_rank: int, act: Callable[[torch.device], None]) -> bool:
    """Call `act` with this rank's device when torch makes its context there; return False if torch cannot say when."""
    module: Any = torch.get_device_module(kind)
    if not hasattr(module, "_lazy_call"):
        return False

    def act_there() -> None:
        index = local_rank if local_rank < module.device_count() else 0
        with module.device(index):
            act(torch.device(kind, index))

    module._lazy_call(act_there)
    return True


def list_device_names() -> list[str]:
    """Return the names of all devices of the accelerator that torch sees in this process."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [device_name(torch.device(accelerator.type, i)) for i in range(torch.accelerator.device_count())]


def describe_build() -> str:
    """Return what torch was built for, such as "CUDA 12.8"; empty: the CPU alone."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}, which torch calls cuda"
    accelerator = torch.accelerator.current_accelerator()
    return "" if accelerator is None else ACCELERATORS[accelerator.type].name


def transport_version() -> dict[str, str]:
    """Return the version of the library for collectives of CUDA's tensors by its name; of others it is unknown."""
    if not torch.cuda.is_available():
        return {}
    from torch.cuda import nccl

    return {"RCCL" if torch.version.hip else "NCCL": ".".join(map(str, nccl.version()))}


def transport_of(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors on a device."""
    return ACCELERATORS[device.type].transport if device.type in ACCELERATORS else "gloo"


def device_name(device: torch.device) -> str:
    """Return the name of a device's model, such as "NVIDIA H100 80GB HBM3"."""
    return "Apple GPU" if device.type == "mps" else _module(device).get_device_name(device)


def device_uuid(device: torch.device) -> str:
    """Return the identifier of a physical device; where torch knows none, its index."""
    if device.type == "mps":
        return "mps"
    return str(getattr(_module(device).get_device_properties(device), "uuid", device.index))


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work; the CPU always has."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        _module(device).synchronize(device)


def wait_for_late_frees(device: torch.device, *, still: float = 0.3, most: float = 3.0) -> None:
    """Wait until a device's allocated bytes have not changed for `still` seconds, for `most` seconds at most.

    NCCL's watchdog frees what finished collectives held some 0.1 s after them, as DDP's first buckets.
    """
    synchronize(device)
    end = time.monotonic() + most
    last_allocated, since = bytes_allocated(device), time.monotonic()
    while (now := time.monotonic()) < end and now - since < still:
        time.sleep(0.02)
        if (allocated := bytes_allocated(device)) != last_allocated:
            last_allocated, since = allocated, time.monotonic()


def bytes_allocated(device: torch.device) -> int:
    """Return the bytes of all tensors on a device."""
    return torch.mps.current_allocated_memory() if device.type == "mps" else _module(device).memory_allocated(device)


def bytes_reserved(device: torch.device) -> int:
    """Return the bytes that torch's allocator has taken from a device."""
    return torch.mps.driver_allocated_memory() if device.type == "mps" else _module(device).memory_reserved(device)


def peak_bytes_allocated(device: torch.device) -> int:
    """Return the most bytes of tensors since `forget_peaks`; on mps, which keeps no peak, those of now."""
    return bytes_allocated(device) if device.type == "mps" else _module(device).max_memory_allocated(device)


def peak_bytes_reserved(device: torch.device) -> int:
    """Return the most bytes that the allocator has had since `forget_peaks`; on mps those of now."""
    return bytes_reserved(device) if device.type == "mps" else _module(device).max_memory_reserved(device)


def forget_peaks(device: torch.device) -> None:
    """Let the peaks begin anew."""
    if device.type != "mps":
        _module(device).reset_peak_memory_stats(device)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device that no process uses, and all."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return _module(device).mem_get_info(device)


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated: what is free, and what torch's allocator keeps for reuse."""
    return free_and_total_bytes(device)[0] + bytes_reserved(device) - bytes_allocated(device)


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process allocate no more than this share of a device's memory."""
    module: Any = torch.mps if device.type == "mps" else _module(device)
    module.set_per_process_memory_fraction(share, *(() if device.type == "mps" else (device,)))


def release_unused_memory(device: torch.device) -> None:
    """Give back what torch's allocator keeps for reuse."""
    _module(device).empty_cache()


def stream_number(device: torch.device) -> int:
    """Return the number that the allocator's history has for a device's current stream."""
    handle = "sycl_queue" if device.type == "xpu" else f"{device.type}_stream"
    return getattr(_module(device).current_stream(device), handle)


def allocator_segments(device: torch.device) -> list[Any]:
    """Return the segments of a device's allocator, without its history where torch can leave that out."""
    without = {"include_traces": False} if device.type in ("cuda", "xpu") else {}
    return _module(device).memory_snapshot(**without)


def keeps_allocator_history(device: torch.device) -> bool:
    """Return whether a device's allocator can record each allocation."""
    return hasattr(getattr(_module(device), "memory", None), "_record_memory_history")


def generator_state(device: torch.device) -> Tensor:
    """Return the state of the generator that draws a device's random numbers."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.mps.get_rng_state() if device.type == "mps" else _module(device).get_rng_state(device)


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the generator that draws a device's random numbers."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    elif device.type == "mps":
        torch.mps.set_rng_state(state.cpu())
    else:
        _module(device).set_rng_state(state.cpu(), device)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
