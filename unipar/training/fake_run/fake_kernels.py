"""Operations whose fake form in torch is stricter than they are; importing this module replaces these forms."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

_ATEN: Any = torch.ops.aten
_ROW_BYTES: Final = 16
"""Bytes of which the rows of a grouped product take a multiple."""


@register_op_impl(_ATEN._grouped_mm.default)
def _fake_grouped_product(
    mode: FakeTensorMode, func: Any, one: Tensor, other: Tensor, offs: Tensor | None = None, *rest: Any, **more: Any
) -> Any:
    """Return a product of groups in any dtype; torch's own form takes bf16 alone."""
    if one.dtype == torch.bfloat16:
        return NotImplemented
    shape = [one.shape[-2], other.shape[-1]]
    if one.ndim == other.ndim:  # a product for each group: of the parts of what they add up over, or of all
        shape.insert(0, one.shape[0] if offs is None else offs.shape[0])
    unit = _ROW_BYTES // one.dtype.itemsize
    row = ceil(shape[-1] / unit) * unit
    with mode:
        return torch.empty_strided(shape, (shape[-2] * row, row, 1)[-len(shape) :], dtype=one.dtype, device=one.device)
