"""Attention of whole sequences by some of the heads: ranks trade their positions for heads, and back (Ulysses)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from unipar.utils.text import count_of
from unipar_mesh.context.kernels import masked_scores, share_in_sum
from unipar_mesh.context.sequence_layout import SequenceLayout


def why_no_exchange(heads: int, ranks: int) -> str:
    """Return why ranks cannot have some of the heads each, in words, or "" if they can."""
    if heads % ranks == 0:
        return ""
    return f"{count_of(heads, 'head')} of queries cannot be divided evenly among {ranks} ranks of parallel.context"


def copies_of_key_heads(key_heads: int, ranks: int) -> int:
    """Return how often each head of keys is sent so that ranks divide the heads; 1 if they divide them as they are."""
    return ranks // math.gcd(key_heads, ranks)


def bytes_beside_gathering(heads: int, key_heads: int, ranks: int, element_size: int) -> float:
    """Return how many times the bytes of gathering keys and values the exchange sends, in forward and backward.

    Gathered are keys and values, once more for the backward, and their gradients, which are summed in 4 bytes at least.
    Exchanged are queries, keys, values and results, once in each direction, of which a rank sends 1 / ranks as much.
    """
    gathered = (2 * element_size + max(4, element_size)) * key_heads * ranks
    exchanged = 2 * element_size * (heads + copies_of_key_heads(key_heads, ranks) * key_heads)
    return exchanged / gathered


def attend_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    mask: Tensor | None,
    dropout: float,
    scale: float,
) -> Tensor:
    """Return the attention of this rank's queries to the whole sequence; `mask` has all rows, or one for all of them.

    Every rank computes some of the heads, as one process computes all of them.
    """
    heads, copies = q.shape[1], copies_of_key_heads(k.shape[1], layout.ranks)
    if copies > 1:
        k, v = (t.repeat_interleave(copies, 1) for t in (k, v))
    parts = [_by_rank(t, layout.ranks) for t in (q, k, v)]
    whole = _ToHeads.apply(torch.cat(parts, -1), layout, group)
    widths = [part.shape[-1] for part in parts]
    q, k, v = (
        t.unflatten(-1, (-1, one.shape[-1])).permute(1, 2, 0, 3)
        for t, one in zip(whole.split(widths, -1), (q, k, v), strict=True)
    )
    first, mine = layout.rank * q.shape[1], q.shape[1]
    if mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
        mask = mask.narrow(-3, first, mine)
    if dropout:
        out = _with_dropout(q, k, v, first, heads, causal=causal, mask=mask, dropout=dropout, scale=scale)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != mine
        )
    part = _ToPositions.apply(out.permute(2, 0, 1, 3).flatten(2), layout, group)
    # positions before heads in memory, so that heads joined again are a view
    return part.unflatten(-1, (mine, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    heads: int,
    *,
    causal: bool,
    mask: Tensor | None,
    dropout: float,
    scale: float,
) -> Tensor:
    """Return attention whose dropout is drawn for all heads, as one process does."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = masked_scores(q, k, mask, causal=causal, scale=scale)
    weights = share_in_sum(scores, scores.logsumexp(-1, keepdim=True))
    drawn = F.dropout(weights.new_ones(weights.shape[0], heads, *weights.shape[2:]), dropout)
    return (weights * drawn.narrow(1, first, q.shape[1])) @ v


def _by_rank(tensor: Tensor, ranks: int) -> Tensor:
    """Return (batch, heads, positions, width) as (ranks, positions, batch, heads of a rank x width)."""
    return tensor.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(3)


def _to_heads(parts: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Send to each rank its heads of this rank's positions; return this rank's heads of all positions, in order."""
    sent = F.pad(parts, (0, 0, 0, 0, 0, layout.most - layout.count())).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got.flatten(0, 1).index_select(0, layout.places(sent.device))


def _to_positions(whole: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Send to each rank its positions of this rank's heads; return all heads of this rank's positions, by rank."""
    sent = whole.new_zeros(layout.ranks * layout.most, *whole.shape[1:])
    sent.index_copy_(0, layout.places(whole.device), whole)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got.unflatten(0, (layout.ranks, -1))[:, : layout.count()]


class _ToHeads(torch.autograd.Function):
    """Exchange of positions for heads; its backward sends gradients the other way."""

    @staticmethod
    @override
    def forward(ctx: Any, parts: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return _to_heads(parts, layout, group)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _to_positions(gradients[0], ctx.layout, ctx.group), None, None


class _ToPositions(torch.autograd.Function):
    """Exchange of heads for positions; its backward sends gradients the other way."""

    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return _to_positions(whole, layout, group)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _to_heads(gradients[0], ctx.layout, ctx.group), None, None
