"""Functions of torch._C that a build with CUDA has: devices, streams, memory, as torch.cuda calls them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.softcuda import activation

CUDA = 1
"""torch's number of the device type."""

OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)

Functions = dict[str, Callable[..., Any]]


def constant(value: Any) -> Callable[..., Any]:
    """Return a function that returns a value, whatever it is called with."""

    def function(*_: Any, **__: Any) -> Any:
        return value

    return function


def add_to(module: Any, native: Any) -> None:
    """Add to torch._C what it would have with CUDA."""
    module._has_cuda = True
    module._CudaDeviceProperties = _Properties
    module._CudaStreamBase = stream_class(module, "cuda")
    module._CudaEventBase = event_class(module, native, "cuda")
    module._cudart, module._nvtx = _Runtime, _Annotations
    module._is_flash_attention_available = constant(True)
    module._nccl_version, module._nccl_version_suffix = constant(2 << 32 | 27 << 16 | 3), constant(b"")
    module._graph_pool_handle = constant((0, 0))
    module._broadcast_coalesced, module._nccl_reduce, module._nccl_all_reduce = _broadcast, _reduce, None
    for name in ("_CUDAGraph", "_CUDAGreenContext", "_MemPool", "_cuda_CUDAAllocator"):
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {}))  # types that torch.cuda derives from at import
    for functions in (_devices(module, native), _streams(module), memory_functions(native), _settings()):
        for name, function in functions.items():
            setattr(module, f"_cuda_{name}", function)


def _broadcast(tensors: Sequence[Any], devices: Sequence[int], _: int) -> list[list[Any]]:
    """Return the tensors on each device, as nn.DataParallel asks for them."""
    return [[t if t.device.index == device else t.to(f"cuda:{device}") for t in tensors] for device in devices]


def _reduce(tensors: Sequence[Any], output: Any, *_: Any) -> None:
    """Add up tensors of several devices in one of them, as nn.DataParallel does with gradients."""
    first, *others = (t.to(output.device) for t in tensors)
    output.copy_(sum(others, start=first))


def _devices(module: Any, native: Any) -> Functions:
    asked: list[bool] = []

    def ask() -> int:
        if not asked:
            activation.settle_devices()
            native.spoil_forks()
            asked.append(True)
        return len(activation.visible)

    def count() -> int:
        if native.is_bad_fork():
            return 0
        number = ask()
        if not activation.profile().driver_works:
            warnings.warn(f"CUDA initialization: {OLD_DRIVER}", UserWarning, stacklevel=3)
        return number

    def init() -> None:
        number = ask()
        if not activation.profile().driver_works:
            raise RuntimeError(OLD_DRIVER)
        if not number:
            raise RuntimeError("No CUDA GPUs are available")
        import torch

        cuda: Any = torch.cuda
        cuda.default_generators = tuple(native.default_generator(i) for i in range(number))
        cuda._get_device_properties = _Properties

    def current() -> int:
        return int(module._accelerator_getDeviceIndex())

    def exchange(device: int) -> int:
        return int(module._accelerator_exchangeDevice(device)) if device >= 0 else -1

    def maybe_exchange(device: int) -> int:  # another function: torch.compile has a table of functions
        return exchange(device)

    return {
        "getDeviceCount": count,
        "init": init,
        "isInBadFork": native.is_bad_fork,
        "getDevice": current,
        "setDevice": module._accelerator_setDeviceIndex,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": maybe_exchange,
        "hasPrimaryContext": native.has_context,
        "canDeviceAccessPeer": constant(True),
        "getCompiledVersion": constant(13000),
        "getArchFlags": constant("sm_75 sm_80 sm_90"),
    }


def _streams(module: Any) -> Functions:
    def current(device: int) -> tuple[int, int, int]:
        stream = module._accelerator_getStream(device)
        return stream.stream_id, stream.device_index, CUDA

    def default(device: int) -> tuple[int, int, int]:
        return 0, device, CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        module._accelerator_setStream(
            module.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    return {
        "synchronize": lambda: module._accelerator_synchronizeDevice(module._accelerator_getDeviceIndex()),
        "getCurrentStream": current,
        "getCurrentRawStream": lambda device: current(device)[0],  # pyright: ignore[reportUnknownLambdaType]
        "getDefaultStream": default,
        "setStream": set_stream,
        "isCurrentStreamCapturing": constant(False),
        "sleep": constant(None),
    }


def memory_functions(native: Any) -> Functions:
    """Return what torch's allocator can be asked, with names as in torch._C after "_cuda_"."""

    def nested(device: int) -> dict[str, Any]:
        found = native.statistics(device)
        none: dict[str, int] = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}

        def pools(counter: dict[str, int]) -> dict[str, Any]:
            return {"all": counter, "large_pool": counter, "small_pool": none}

        return {
            "allocation": pools(found["allocations"]),
            "active": pools(found["allocations"]),
            "segment": pools(none),
            "inactive_split": pools(none),
            "allocated_bytes": pools(found["allocated"]),
            "active_bytes": pools(found["allocated"]),
            "reserved_bytes": pools(found["reserved"]),
            "requested_bytes": pools(found["requested"]),
            "inactive_split_bytes": pools(none),
            "oversize_allocations": none,
            "oversize_segments": none,
            "num_alloc_retries": 0,
            "num_ooms": found["out_of_memory"],
            "num_sync_all_streams": 0,
            "num_device_alloc": 0,
            "num_device_free": 0,
            "max_split_size": -1,
        }

    def host() -> dict[str, Any]:
        active, owned = native.pinned_statistics()
        return {"active_bytes": active, "allocated_bytes": owned}

    def snapshot(*_: Any) -> dict[str, Any]:
        segments: list[dict[str, Any]] = []
        for device, address, size, requested, stream in native.live_blocks():
            place = {"address": address, "stream": stream, "device": device}
            block = {"state": "active_allocated", "size": size, "requested_size": requested, "address": address}
            segments.append({**place, "total_size": size, "segment_type": "large", "blocks": [block]})
        traces: list[list[dict[str, Any]]] = [[] for _ in activation.visible]
        for allocation, device, address, size, stream in native.history():
            action = "alloc" if allocation else "free_requested"
            entry = {"action": action, "addr": address, "size": size, "stream": stream, "frames": []}
            traces[device].append(entry)
            if not allocation:
                traces[device].append({**entry, "action": "free_completed"})
        kept = [trace[-entries_kept[0] :] for trace in traces]
        return {"segments": segments, "device_traces": kept, "allocator_settings": {}}

    entries_kept = [sys.maxsize]

    def record(
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        most: int = sys.maxsize,
        *_: Any,
        **__: Any,
    ) -> None:
        entries_kept[0] = most
        native.record_history(enabled is not None)

    def record_all(enabled: str | None, *_: Any) -> None:
        record(enabled)

    fractions: dict[int, float] = {}

    def limit(fraction: float, device: int) -> None:
        fractions[device] = fraction
        native.limit_memory(device, fraction)

    def fraction_of(device: int) -> float:
        return fractions.get(device, 1.0)

    return {
        "memoryStats": nested,
        "resetPeakMemoryStats": native.reset_peaks,
        "resetAccumulatedMemoryStats": constant(None),
        "hostMemoryStats": host,
        "resetPeakHostMemoryStats": native.reset_pinned_peaks,
        "resetAccumulatedHostMemoryStats": constant(None),
        "emptyCache": lambda *_: native.empty_cache(),
        "memorySnapshot": snapshot,
        "record_memory_history": record,
        "record_memory_history_legacy": record_all,
        "setMemoryFraction": limit,
        "getMemoryFraction": fraction_of,
        "getAllocatorBackend": constant("native"),
        "attach_out_of_memory_observer": native.observe_out_of_memory,
        "beginAllocateCurrentThreadToPool": constant(None),
        "beginAllocateToPool": constant(None),
        "endAllocateToPool": constant(None),
        "releasePool": constant(None),
        "cudaHostAllocator": constant(0),
        "ipc_collect": constant(None),
    }


def _settings() -> Functions:
    debug = {"mode": 0}

    def set_mode(mode: int) -> None:
        debug["mode"] = mode

    return {
        "set_sync_debug_mode": set_mode,
        "get_sync_debug_mode": lambda: debug["mode"],
        "clearCublasWorkspaces": constant(None),
        "lock_mutex": constant(None),
        "unlock_mutex": constant(None),
    }


class _Properties:
    """cudaDeviceProp of one device."""

    gcnArchName = ""  # noqa: N815 - names of torch
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_multiprocessor = 167936
    L2_cache_size = 41943040
    is_integrated = is_multi_gpu_board = 0

    def __init__(self, index: int) -> None:
        machine = activation.profile()
        self.name, self.total_memory = machine.name, machine.memory
        self.major, self.minor = machine.capability
        self.multi_processor_count = machine.processors
        self.uuid = activation.visible[index].partition("-")[2]


class _Runtime:
    """The CUDA runtime, as torch.cuda.cudart() gives it."""

    class cudaError:  # noqa: N801
        """Error codes."""

        success = 0

    cudaGetErrorString = staticmethod(str)  # noqa: N815
    cudaProfilerStart = cudaProfilerStop = staticmethod(constant(0))  # noqa: N815
    cudaHostRegister = cudaHostUnregister = staticmethod(constant(0))  # noqa: N815

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:  # noqa: N802
        """Return free and all bytes of a device."""
        return activation.native.memory_info(device)


class _Annotations:
    """NVTX ranges, which nothing shows."""

    rangePushA = rangePop = rangeStartA = rangeEnd = markA = staticmethod(constant(0))  # noqa: N815


def stream_class(module: Any, kind: str) -> type:
    """Return the base of torch.cuda.Stream, or of another device's; `module` is torch._C."""

    class Stream(module.Stream):
        """A stream by its id, or a new one of the current device."""

        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int | None = None,
            device_type: int | None = None,
            stream_ptr: int = 0,
            **_: Any,
        ) -> Any:
            if stream_id is not None:
                return module.Stream.__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type or CUDA
                )
            device = f"{kind}:{module._accelerator_getDeviceIndex()}"
            return module.Stream.__new__(cls, device=device, priority=priority)

    setattr(Stream, f"{kind}_stream", property(lambda self: self.stream_id))
    return Stream


def event_class(module: Any, native: Any, kind: str) -> type:
    """Return the base of torch.cuda.Event, or of another device's."""

    class Event(module.Event):
        """An event of the device, whatever its streams are."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
            return module.Event.__new__(
                cls, device=kind, enable_timing=enable_timing, blocking=blocking, interprocess=False
            )

        def elapsed_time(self, end_event: Any) -> float:
            """Return the milliseconds between both; the base class takes no instance of a derived one."""
            return native.elapsed_time(self.event_id, end_event.event_id)

    setattr(Event, f"{kind}_event", property(lambda self: self.event_id))
    return Event
