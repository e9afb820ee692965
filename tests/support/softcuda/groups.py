"""Process groups of NCCL and HCCL, and gloo for CUDA tensors, as torch.distributed expects to find them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tests.support.softcuda import activation
from tests.support.softcuda.cuda_functions import constant


@dataclass(frozen=True)
class Transport:
    """A library of collectives: what its process group is called, and how it refuses two ranks on one device."""

    name: str
    title: str
    error: str


NCCL = Transport(
    "nccl",
    "ProcessGroupNCCL",
    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
    "Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {device}",
)
HCCL = Transport("hccl", "ProcessGroupHCCL", "HCCL error: rank {rank} and rank {other} both on NPU {device}")

_alive: list[Any] = []
"""Gloo's threads must not outlive their groups, nor these the interpreter."""


def add_to(module: Any, native: Any, torch_module: Any) -> None:
    """Add the process groups to torch._C._distributed_c10d; the other module is torch._C."""
    native.bind_groups()
    module._DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)
    module.ProcessGroupNCCL = group_class(NCCL, module, native, torch_module)
    let_gloo_move("cuda", module, native)


def group_class(transport: Transport, module: Any, native: Any, torch_module: Any) -> Any:
    """Return the class of process groups of a library."""

    class Options(module.Backend.Options):
        """Options of a group, such as ProcessGroupNCCL.Options."""

        class Config:
            """ncclConfig_t: any attribute may be set, and none has an effect."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(transport.name, timedelta(minutes=10))
            self.is_high_priority_stream, self.config = is_high_priority_stream, Options.Config()
            self.split_from, self.split_color = None, 0

        def __deepcopy__(self, memo: Any) -> Any:
            copy = Options(self.is_high_priority_stream)
            copy._timeout = self._timeout
            return copy

    class ProcessGroup(native.Group):
        """The library's process group."""

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
                        transport.error.format(rank=rank, other=other, device=devices[rank])
                    )

            def split(under: Any, some: list[int]) -> Any:
                part = Options()
                part._timeout, part.group_name = options._timeout, f"{name}.{some}"
                part.global_ranks_in_group = [ranks[i] for i in some]
                return ProcessGroup(under, some.index(rank), len(some), part)

            super().__init__(gloo, _root_of(store, module), ranks, name, _milliseconds(options), True, connect, split)
            _alive.append((self, gloo))

        @property
        def options(self) -> Any:
            """The options that it was made with."""
            return self._options

    ProcessGroup.Options = Options  # pyright: ignore[reportAttributeAccessIssue]
    ProcessGroup.__name__ = transport.title
    return ProcessGroup


def let_gloo_move(kind: str, module: Any, native: Any) -> None:
    """Let gloo move a device's tensors: it has no kernels for them in a build without CUDA."""
    register = module.ProcessGroup._register_backend

    def register_backend(self: Any, device: Any, kind_of_backend: Any, backend: Any = None) -> Any:
        if device.type == kind and isinstance(backend, module.ProcessGroupGloo):
            plain, ranks = backend, list(range(backend.size()))
            store, wait = module.HashStore(), int(timedelta(minutes=30).total_seconds() * 1000)
            backend = native.Group(plain, store, ranks, "gloo", wait, False, constant(None), constant(None))
            _alive.append((backend, plain))
            kind_of_backend = module.ProcessGroup.BackendType.CUSTOM
        return register(self, device, kind_of_backend, backend)

    module.ProcessGroup._register_backend = register_backend


def _root_of(store: Any, module: Any) -> Any:
    """Return the store under all prefixes, which the ranks of all groups share."""
    while isinstance(store, module.PrefixStore):
        store = store.underlying_store
    return store


def _milliseconds(options: Any) -> int:
    return int(options._timeout.total_seconds() * 1000)
