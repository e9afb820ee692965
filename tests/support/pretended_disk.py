"""Disk that DeepSpeed swaps to, without its compiled library: files are written and read at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, final
from unittest.mock import patch

import torch
from torch import Tensor

LIMITS: dict[str, tuple[str, str]] = {
    "smallest": ("swapped", "SWAPPED_BYTES"),
    "buffer": ("swapped", "BUFFER_ELEMENTS"),
    "in_memory": ("swapped", "IN_MEMORY"),
    "sub_group": ("model", "SUB_GROUP"),
}
"""DeepSpeed's limits that tests lower, each with the module of closed forms and the constant that repeats it."""


@contextmanager
def lowered_limits(limits: Mapping[str, int]) -> Generator[None]:
    """Context manager: closed forms and DeepSpeed have these limits, and DeepSpeed writes through `PretendedDisk`."""
    import deepspeed.ops.op_builder as builders
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
    from unipar_deepspeed.prediction import swapped
    from unipar_deepspeed.prediction import zero_model as model

    modules = {"model": model, "swapped": swapped}
    patches = [patch.object(modules[LIMITS[name][0]], LIMITS[name][1], limit) for name, limit in limits.items()]
    if smallest := limits.get("smallest"):
        patches += [patch.object(m, "MIN_AIO_BYTES", smallest) for m in (optimizer_utils, partitioned_param_swapper)]
    with patch.object(vars(builders)["AsyncIOBuilder"], "load", _load_library):
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def settings_of_limits(settings: dict[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """Return DeepSpeed's settings with these limits."""
    zero: dict[str, Any] = {**settings["zero_optimization"], "sub_group_size": limits.get("sub_group", 10**9)}
    if "offload_param" in zero:
        given = {"buffer_size": limits.get("buffer"), "max_in_cpu": limits.get("in_memory")}
        zero["offload_param"] = zero["offload_param"] | {k: v for k, v in given.items() if v is not None}
    return settings | {"zero_optimization": zero, "aio": {"block_size": limits.get("smallest", 2**20)}}


def bytes_in_files(folder: Path, rank: int) -> dict[str, int]:
    """Return the bytes of a rank's files, by the category of what they hold."""
    sums: Counter[str] = Counter()
    for file in folder.glob(f"zero_stage_3/*/rank{rank}/*.swp"):
        if "optimizer" not in file.parts:
            sums["parameters"] += file.stat().st_size
        elif "_gradient_" in file.name:
            sums["gradients"] += file.stat().st_size
        else:
            sums["optimizer" if file.name.startswith("exp_avg") else "masters"] += file.stat().st_size
    return dict(sums)


@final
class _PretendedDisk:
    """Reads and writes whole files; memory is pinned if it was got here."""

    pinned: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, **_settings: Any) -> None:
        self._waiting = 0

    def new_cpu_locked_tensor(self, elements: int, like: Tensor) -> Tensor:
        """Return memory that counts as pinned."""
        t = torch.empty(elements, dtype=like.dtype)
        self.pinned[t.untyped_storage().data_ptr()] = t
        return t

    def free_cpu_locked_tensor(self, t: Tensor) -> None:
        """Forget memory."""
        self.pinned.pop(t.untyped_storage().data_ptr(), None)

    def is_pinned(self, t: Tensor) -> bool:
        """Return whether memory was got here."""
        return t.untyped_storage().data_ptr() in self.pinned

    def async_pwrite(self, t: Tensor, path: str, _offset: int) -> int:
        """Write a file."""
        assert self.is_pinned(t)
        Path(path).write_bytes(t.detach().view(torch.uint8).numpy().tobytes())
        self._waiting += 1
        return 0

    def async_pread(self, t: Tensor, path: str, _offset: int) -> int:
        """Read a file as long as the tensor."""
        assert self.is_pinned(t)
        read = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        t.detach().view(torch.uint8).copy_(read)
        self._waiting += 1
        return 0

    def wait(self) -> int:
        """Return the number of files since the last call."""
        done, self._waiting = self._waiting, 0
        return done


class _Library:
    """Library that DeepSpeed loads instead of its compiled one."""

    aio_handle = _PretendedDisk


def _load_library(*_: Any, **__: Any) -> type[_Library]:
    return _Library
