"""ProcessGroupNCCL, and gloo for tensors of the device, as torch.distributed expects to find them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from tests.support.softcuda import activation
from tests.support.softcuda.cuda_functions import constant


def add_to(module: Any, native: Any, torch_module: Any) -> None:
    """Add the process groups to torch._C._distributed_c10d; the other module is torch._C."""
    native.bind_groups()
    alive: list[Any] = []  # gloo's threads must not outlive their groups, nor these the interpreter

    class Options(module.Backend.Options):
        """ProcessGroupNCCL.Options."""

        class Config:
            """ncclConfig_t: any attribute may be set, and none has an effect."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl", timedelta(minutes=10))
            self.is_high_priority_stream, self.config = is_high_priority_stream, Options.Config()
            self.split_from, self.split_color = None, 0

        def __deepcopy__(self, memo: Any) -> Any:
            copy = Options(self.is_high_priority_stream)
            copy._timeout = self._timeout
            return copy

    class ProcessGroupNCCL(native.Group):
        """NCCL's process group."""

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            ranks = list(getattr(options, "global_ranks_in_group", ())) or list(range(size))
            name = str(getattr(options, "group_name", "")) or "default"
            later = options._timeout + timedelta(minutes=1)  # NCCL's watchdog comes first
            gloo = module.ProcessGroupGloo(module.PrefixStore("softcuda", store), rank, size, timeout=later)
            self._options = options

            def connect(device: int) -> None:
                store.set(f"softcuda/{rank}", f"{os.uname().nodename} {activation.visible[device]}")
                devices = [store.get(f"softcuda/{other}").decode() for other in range(size)]
                if devices.count(devices[rank]) > 1:
                    other = next(i for i in range(size) if i != rank and devices[i] == devices[rank])
                    raise torch_module._DistBackendError(
                        "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
                        f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {devices[rank]}"
                    )

            def split(under: Any, some: list[int]) -> Any:
                part = Options()
                part._timeout, part.group_name = options._timeout, f"{name}.{some}"
                part.global_ranks_in_group = [ranks[i] for i in some]
                return ProcessGroupNCCL(under, some.index(rank), len(some), part)

            super().__init__(gloo, _root_of(store, module), ranks, name, _milliseconds(options), True, connect, split)
            alive.append((self, gloo))

        @property
        def options(self) -> Any:
            """The options that it was made with."""
            return self._options

    module._DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)
    ProcessGroupNCCL.Options = Options  # pyright: ignore[reportAttributeAccessIssue]
    module.ProcessGroupNCCL = ProcessGroupNCCL

    register = module.ProcessGroup._register_backend

    def register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> Any:
        """Let gloo move the device's tensors: it has no kernels for them in a build without CUDA."""
        if device.type == "cuda" and isinstance(backend, module.ProcessGroupGloo):
            plain, ranks = backend, list(range(backend.size()))
            store, wait = module.HashStore(), int(timedelta(minutes=30).total_seconds() * 1000)
            backend = native.Group(plain, store, ranks, "gloo", wait, False, constant(None), constant(None))
            alive.append((backend, plain))
            kind = module.ProcessGroup.BackendType.CUSTOM
        return register(self, device, kind, backend)

    module.ProcessGroup._register_backend = register_backend


def _root_of(store: Any, module: Any) -> Any:
    """Return the store under all prefixes, which the ranks of all groups share."""
    while isinstance(store, module.PrefixStore):
        store = store.underlying_store
    return store


def _milliseconds(options: Any) -> int:
    return int(options._timeout.total_seconds() * 1000)
