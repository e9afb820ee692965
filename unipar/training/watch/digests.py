"""Digests of tensors: cheap to make, and other ones if a single bit is."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_ROW: Final = 1023
"""Elements whose bits are combined by exclusive or: an odd number, so that equal elements do not cancel out."""


def digest_tensor(tensor: Tensor) -> int:
    """Return a number of 62 bits that depends on the values of all elements and, row by row, on their places."""
    t = tensor.detach()
    if t.is_complex():
        t = torch.view_as_real(t)
    flat = t.reshape(-1)
    rows = len(flat) // _ROW
    made = hashlib.blake2b(digest_size=8)
    if rows:
        made.update(_as_bytes(torch.hash_tensor(flat[: rows * _ROW].view(rows, _ROW), dim=1)))
    made.update(_as_bytes(flat[rows * _ROW :]))
    return int.from_bytes(made.digest()) >> 2


def _as_bytes(t: Tensor) -> bytes:
    bits: Any = t.contiguous().view(torch.uint8) if t.numel() else t.new_empty(0, dtype=torch.uint8)
    return np.ascontiguousarray(bits.cpu().numpy()).tobytes()
