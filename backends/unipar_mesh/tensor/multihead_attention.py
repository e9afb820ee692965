"""torch.nn.MultiheadAttention on this rank's heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from unipar.errors import TaskError
from unipar_mesh.sequence.sequence_parts import BlockParts
from unipar_mesh.tensor.sum_collectives import enter, leave


def attend_with_parts(
    module: Any,
    group: dist.ProcessGroup | None,
    ranks: int,
    rank: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    parts: BlockParts | None = None,
    dims: tuple[int | None, ...] = (None, None, None),
    to: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what the module's own forward does; its input projections are this rank's heads, its output a row.

    `parts`: query, key and value are parts of sequences, cut along `dims` where that is not None, and so is the output,
    along `to`.
    """
    heads, batched, first = module.num_heads // ranks, query.ndim == 3, module.batch_first
    if need_weights and not average_attn_weights:
        raise TaskError(
            "tensor: MultiheadAttention is cut over its heads, and need_weights=True with average_attn_weights=False "
            "asks for those of all heads: return {its name: 'whole'} from the task's tensor()"
        )
    inputs: dict[int, Tensor] = {}  # one sum for what is the same tensor
    uses: dict[int, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {}
    for x, dim in zip((query, key, value), dims, strict=True):
        if dim is None or parts is None:
            inputs.setdefault(id(x), enter(x, group))
        else:
            gathered = parts.gathered(x, dim)
            inputs[id(x)], uses[id(x)] = gathered.whole, gathered.use
    weights = (
        module.in_proj_weight.chunk(3)
        if module.in_proj_weight is not None
        else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not batched:
            x = x.unsqueeze(0)
        elif not first:
            x = x.transpose(0, 1)
        return F.linear(x, weight, bias)

    projected = [
        uses[id(x)](partial(project, weight=w, bias=b)) if id(x) in uses else project(inputs[id(x)], w, b)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected)
    mask = _mask(key_padding_mask, attn_mask, q, k, module.num_heads, rank)
    dropout = module.dropout if module.training else 0.0
    if not need_weights and dropout == 0.0:
        out, shares = F.scaled_dot_product_attention(q, k, v, mask), None
    else:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        shares = (scores if mask is None else scores + mask).softmax(-1)
        if dropout > 0:
            all_heads = torch.ones(q.shape[0], module.num_heads, *shares.shape[-2:], dtype=q.dtype, device=q.device)
            shares = shares * F.dropout(all_heads, dropout).narrow(1, rank * heads, heads)
        out = shares @ v
    # laid out as torch does it, queries first: a dropout behind draws its mask in the order of memory
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), module.out_proj.weight)
    bias = module.out_proj.bias
    if parts is None or to is None:
        out = leave(out, group)
    else:
        along = 0 if not batched or (to == -2) == first else 1
        out = parts.scattered(out, along)
        bias = None if bias is None else enter(bias, group)
    if bias is not None:
        out = out + bias.to(out.dtype)
    mean = None if shares is None or not need_weights else leave(shares.sum(1) / module.num_heads, group)
    if not batched:
        return out.squeeze(1), None if mean is None else mean.squeeze(0)
    return out.transpose(0, 1) if first else out, mean


def _mask(padding: Tensor | None, allowed: Tensor | None, q: Tensor, k: Tensor, heads: int, rank: int) -> Tensor | None:
    """Return both masks as one that is added to the scores: batch x heads or 1 x queries x keys."""
    mask = None
    if allowed is not None:
        mask = _added(allowed, q.dtype)
        if mask.ndim == 3:  # one for each sample and head
            local = q.shape[1]
            mask = mask.unflatten(0, (-1, heads)).narrow(1, rank * local, local)
    if padding is not None:
        padding = padding if padding.ndim == 2 else padding.unsqueeze(0)
        added = _added(padding, q.dtype)[:, None, None, :]
        mask = added if mask is None else mask + added
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
