"""Tensors as the bytes of a shard: dtypes by their names in safetensors, and the memory of a tensor."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch import Tensor

from unipar.errors import CheckpointError

DTYPE_OF_NAME: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Dtypes of torch by their names in safetensors."""

_NAME_OF_DTYPE: Final = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


def dtype_name(t: Tensor, called: str) -> str:
    """Return the name of a tensor's dtype in safetensors; raise CheckpointError if it has none there."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints hold little-endian numbers, and this machine is big-endian")
    if t.dtype not in _NAME_OF_DTYPE:
        raise CheckpointError(f"{called} is of {t.dtype}, which the shards of a checkpoint cannot hold")
    return _NAME_OF_DTYPE[t.dtype]


def bytes_of(t: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat: Any = t.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())
