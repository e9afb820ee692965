"""Operations whose fake form in torch is stricter than they are, or which torch does not count."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import sdpa_flop_count

_ATEN: Any = torch.ops.aten
_ROW_BYTES: Final = 16
"""Bytes of which the rows of a grouped product take a multiple."""


def _attention_forward(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


def _grouped_product(one: Any, other: Any, *rest: Any, **more: Any) -> int:
    groups = one.shape[0] if one.ndim == other.ndim == 3 else 1
    return int(2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1])


for _formula in (_attention_forward, _attention_backward, _grouped_product):
    vars(_formula)["_get_raw"] = True  # torch gives them tensors

MORE_FLOP_FORMULAS: Mapping[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped_product,
}
"""Formulas that torch's counter lacks: fake tensors take the CPU's attention, and mixtures of experts its products."""


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
