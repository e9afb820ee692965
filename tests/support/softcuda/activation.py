"""The emulated device in this process: what is added to torch as its modules are imported, where it is CUDA."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, final

from typing_extensions import override

from tests.support.softcuda.profiles import Profile, profile_of, visible_devices

FOLDER = "SOFTCUDA_LIBRARIES"
"""Environment variable with the folder of the compiled libraries."""

native: Any = None
"""The module of compiled functions, once torch is imported."""

visible: list[str] = []
"""UUIDs of this process's devices; settled when the device is first asked."""


def install() -> None:
    """Let torch have a CUDA device in this process; before it is imported. Others are loaded by torch itself."""
    if profile().kind != "cuda":
        return
    sys.meta_path.insert(0, _Completions({
        "torch._C": _complete_c,
        "torch.version": _complete_version,
        "torch.cuda": _complete_cuda,
        "torch.storage": _complete_storage,
        "unipar.distributed.accelerators": _complete_accelerators,
    }))  # fmt: skip


def profile() -> Profile:
    """Return this process's machine."""
    known = profile_of()
    assert known is not None, "install() is called where the variable is set"
    return known


def settle_devices() -> None:
    """Read CUDA_VISIBLE_DEVICES, or the other device's variable, as its driver does when it is first asked."""
    visible[:] = visible_devices(profile()) if profile().driver_works else []
    device_library: Any = ctypes.CDLL(str(_libraries() / "libsoftcuda.so"))
    device_library.softcuda_configure(len(visible), ctypes.c_int64(profile().memory))


@final
class _Completions(importlib.abc.MetaPathFinder):
    """Calls a function with a module just after it was executed."""

    def __init__(self, completions: dict[str, Callable[[Any], None]]) -> None:
        self.completions = completions

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.completions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute, complete = loader.exec_module, self.completions[fullname]
        if fullname == "torch._C":  # torch asks for CUDA's hooks once, as soon as it is loaded
            settle_devices()

        def exec_module(module: ModuleType) -> None:
            execute(module)
            complete(module)

        loader.exec_module = exec_module
        return spec


def _libraries() -> Path:
    return Path(os.environ[FOLDER])


def load_native() -> Any:
    """Return the module of compiled functions, which reports from now on."""
    global native
    spec = importlib.util.spec_from_file_location("_softcuda", _libraries() / "_softcuda.so")
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    from tests.support.softcuda import findings

    findings.listen(native)
    return native


def _complete_c(module: Any) -> None:
    load_native()
    from tests.support.softcuda import cuda_functions, groups

    cuda_functions.add_to(module, native)
    initialise = module._c10d_init

    def c10d_init() -> Any:
        done = initialise()
        groups.add_to(sys.modules["torch._C._distributed_c10d"], native, module)
        return done

    module._c10d_init = c10d_init


def _complete_version(module: Any) -> None:
    module.cuda = "13.0"


def _complete_cuda(module: Any) -> None:
    """Let torch count devices as NVML does; it loads the driver's library by itself, not pynvml."""

    def count() -> int:
        return profile().devices if profile().torch_counts else -1

    def uuids() -> list[str] | None:
        return [profile().gpu_uuid(i) for i in range(profile().devices)] if profile().torch_counts else None

    module._raw_device_count_nvml, module._raw_device_uuid_nvml = count, uuids


def _complete_storage(module: Any) -> None:
    """Make and resize storages of the device, which torch compiles in only with CUDA."""
    make, resize = module.UntypedStorage.__new__, module.UntypedStorage.resize_

    def new(cls: Any, *size: Any, device: Any = None, **more: Any) -> Any:
        if device is None or not str(device).startswith("cuda"):
            return make(cls, *size, **({"device": device} if device is not None else {}), **more)
        import torch

        return torch.empty(size or (0,), dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        native.resize_storage(self._cdata, size)
        return self

    module.UntypedStorage.__new__, module.UntypedStorage.resize_ = new, resize_


def _complete_accelerators(module: Any) -> None:
    """Let unipar know that torch and this machine have CUDA: it reads torch's version file, and loads a library."""
    module.read_torch_builds = lambda: {"cuda"}
    module._has_cuda_driver = lambda: profile().driver_works
