"""Settings of torch that decide the last digits on a device, and operations that have no deterministic kernel."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch

_WITHOUT_KERNEL: Final = re.compile(r"^(?P<name>.+?) does not have a deterministic implementation")
_WORKSPACE: Final = "because it uses CuBLAS"
"""Part of torch's warning where cuBLAS has another workspace than it needs."""


def set_numbers(*, strict: bool) -> bool:
    """Switch off TF32, cuDNN's search and its attention, and ask for deterministic kernels; return whether TF32 was on.

    `strict`: an operation without such a kernel is an error. Attention is deterministic only then.
    """
    had_tf32 = torch.get_float32_matmul_precision() != "highest"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    return had_tf32


@contextmanager
def unrepeatable_operations() -> Generator[list[str]]:
    """Context manager: the names of operations that have no deterministic kernel, in a list when the body has ended."""
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield names
    names += sorted({name for warning in caught if (name := _operation_in(str(warning.message)))})


def _operation_in(message: str) -> str:
    if _WORKSPACE in message:
        return "cuBLAS"
    match = _WITHOUT_KERNEL.match(message)
    return match["name"] if match else ""
