"""Attention over a sequence whose positions are spread over ranks: keys and values gathered, or passed in a ring.

One way for the CPU and for CUDA: torch's own kernels run on the parts, and their results are merged by log-sum-exp.
On CUDA torch's own ring does the same (torch_ring.py), for some attentions only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from unipar.errors import TaskError
from unipar_mesh.context.head_exchange import attend_by_heads, bytes_beside_gathering, why_no_exchange
from unipar_mesh.context.kernels import attend, attend_backward, masked_scores, share_in_sum
from unipar_mesh.context.sequence_layout import SequenceLayout
from unipar_mesh.context.torch_ring import attend_in_torch_ring, why_no_torch_ring

Way = Literal["gather", "ring", "ulysses", "torch"]
"""Way of an attention to the positions of other ranks."""

Choice = Way | Literal["auto"]
"""What a config says; auto: torch's ring on CUDA where it can, else gather, or ulysses where that sends fewer bytes."""

_LOG = logging.getLogger("unipar")

_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or vars(dist)["all_gather_into_tensor"]  # before torch 2.13
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or vars(dist)["reduce_scatter_tensor"]


def _padded(part: Tensor, dim: int, rows: int) -> Tensor:
    """Return the tensor with `dim` first, filled up with zeros to this many rows, contiguous."""
    moved = part.movedim(dim, 0)
    if moved.shape[0] < rows:
        moved = torch.cat([moved, moved.new_zeros(rows - moved.shape[0], *moved.shape[1:])])
    return moved.contiguous()


class _Gather(torch.autograd.Function):
    """Gathering of a sequence's parts; its backward sums the gradients of all ranks, and keeps this rank's part."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, dim: int, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.layout, ctx.group = dim, layout, group
        mine = _padded(part, dim, layout.most)
        parts = mine.new_empty(layout.ranks * layout.most, *mine.shape[1:])
        _ALL_GATHER(parts, mine, group=group)
        return parts.index_select(0, layout.places(part.device)).movedim(0, dim).contiguous()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        layout: SequenceLayout = ctx.layout
        gradient = gradients[0].movedim(ctx.dim, 0)
        parts = gradient.new_zeros(layout.ranks * layout.most, *gradient.shape[1:])
        parts.index_copy_(0, layout.places(gradient.device), gradient)
        mine = parts.new_empty(layout.most, *parts.shape[1:])
        _REDUCE_SCATTER(mine, parts, group=ctx.group)
        return mine[: layout.count()].movedim(0, ctx.dim), None, None, None


def gather_sequence(part: Tensor, dim: int, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence in its order, from the part of each rank."""
    return _Gather.apply(part, dim % part.dim(), layout, group)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class _Parts:
    """The way of keys and values between ranks, and what this rank's queries do with each part."""

    layout: SequenceLayout
    group: dist.ProcessGroup
    in_ring: bool

    def keys(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank, and its keys and values; this rank's first."""
        ranks, rank = self.layout.ranks, self.layout.rank
        if not self.in_ring:
            parts = mine.new_empty(ranks, *mine.shape)
            _ALL_GATHER(parts.flatten(0, 1), mine, group=self.group)
            for step in range(ranks):
                yield (rank - step) % ranks, parts[(rank - step) % ranks]
            return
        here = mine
        for step in range(ranks):
            coming, pending = self._pass_on(here) if step + 1 < ranks else (here, [])
            yield (rank - step) % ranks, here  # used while the next part is on its way
            for work in pending:
                work.wait()
            here = coming

    def _pass_on(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Begin to send the tensor to the next rank, and to receive the one before's."""
        ranks, rank = self.layout.ranks, self.layout.rank
        coming = torch.empty_like(tensor)
        after, before = (dist.get_global_rank(self.group, (rank + by) % ranks) for by in (1, -1))
        return coming, dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, after, self.group), dist.P2POp(dist.irecv, coming, before, self.group)]
        )

    def home(self, gradients: Iterator[Tensor]) -> Tensor:
        """Return the sum over ranks of the gradients of this rank's keys; `gradients` are in the order of `keys`."""
        ranks, rank = self.layout.ranks, self.layout.rank
        if not self.in_ring:
            first = next(gradients)
            parts = first.new_empty(ranks, *first.shape)
            parts[rank] = first
            for step, part in enumerate(gradients, 1):
                parts[(rank - step) % ranks] = part
            _REDUCE_SCATTER(first, parts.flatten(0, 1), group=self.group)
            return first
        total = next(gradients)
        for part in gradients:  # the sum follows its keys around the ring, one step behind
            coming, pending = self._pass_on(total)
            for work in pending:
                work.wait()
            total = coming.add_(part)
        coming, pending = self._pass_on(total)
        for work in pending:
            work.wait()
        return coming


@dataclass(frozen=True)
class _AttentionSettings:
    """Settings of one attention, besides its tensors."""

    parts: _Parts
    causal: bool
    scale: float
    mask: Tensor | None

    def work(self, owner: int, q: Tensor) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
        """Yield rows of queries and of a rank's keys, whether causal inside, and the mask between both."""
        for rows, columns, causal in self.parts.layout.tasks(owner, causal=self.causal):
            if rows.start == rows.stop or columns.start == columns.stop:
                continue
            mask = self.mask
            if mask is not None and mask.shape[-1] > 1:
                mask = mask.index_select(-1, self.parts.layout.positions(q.device, owner))
            yield rows, columns, causal, mask


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks; only this rank's part is kept for the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: _AttentionSettings) -> Tensor:
        exact = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        batch, heads, n = q.shape[:3]
        out = q.new_zeros(batch, n, heads, v.shape[-1], dtype=exact).transpose(1, 2)  # as kernels put it out: heads
        # joined again is then a view, and what follows keeps no copy
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=exact)
        for owner, part in settings.parts.keys(_pack(k, v, settings.parts.layout.most)):
            keys, values = _unpack(part, k.shape[-1], q.shape[1])
            for rows, columns, causal, mask in settings.work(owner, q):
                one, its_lse = attend(
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns], mask, causal, settings.scale
                )
                both = torch.logaddexp(lse[:, :, rows], its_lse.to(exact))
                old, new = (share_in_sum(of, both).unsqueeze(-1) for of in (lse[:, :, rows], its_lse))
                out[:, :, rows] = out[:, :, rows] * old + one.to(exact) * new
                lse[:, :, rows] = both
        ctx.settings = settings
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        settings: _AttentionSettings = ctx.settings
        q, k, v, out, lse = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        queries = torch.zeros_like(q, dtype=lse.dtype)

        def keys() -> Iterator[Tensor]:
            for owner, part in settings.parts.keys(_pack(k, v, settings.parts.layout.most)):
                keys, values = _unpack(part, k.shape[-1], q.shape[1])
                of_part = torch.zeros_like(part, dtype=lse.dtype)
                for rows, columns, causal, mask in settings.work(owner, q):
                    dq, dk, dv = attend_backward(
                        gradient[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns],
                        out[:, :, rows], lse[:, :, rows], mask, causal, settings.scale,
                    )  # fmt: skip
                    queries[:, :, rows] += dq
                    # heads that share keys: their gradients are summed
                    both = torch.cat([dk, dv], -1).to(lse.dtype).unflatten(1, (k.shape[1], -1)).sum(2)
                    of_part[:, :, columns] += both
                yield of_part

        mine = settings.parts.home(keys())[:, :, : k.shape[-2]]
        return (
            queries.to(q.dtype),
            mine[..., : k.shape[-1]].to(k.dtype),
            mine[..., k.shape[-1] :].to(v.dtype),
            None,
        )


def _pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Return keys and values side by side, filled up to this many rows."""
    both = torch.cat([k, v], -1)
    return F.pad(both, (0, 0, 0, rows - both.shape[-2])).contiguous()


def _unpack(part: Tensor, width: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, once for each head of queries."""
    if part.shape[1] != heads:
        part = part.repeat_interleave(heads // part.shape[1], 1)
    return part[..., :width], part[..., width:]


_reasons_logged: set[str] = set()
"""Reasons in rank 0's log, without their numbers."""


def tell_once(name: str, why: str, way: Way) -> None:
    """Write into rank 0's log why torch's ring is not taken, once for each kind of reason; `name`: of the block."""
    kind = "".join(c for c in why if not c.isdigit())
    if dist.get_rank() == 0 and kind not in _reasons_logged:
        _reasons_logged.add(kind)
        _LOG.warning("parallel.context: the attention of %s is not torch's own: %s; %s is used instead", name, why, way)


def as_computed(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors in the dtype in which autocast lets attention be computed; those of yes or no as they are."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]


def choose_way(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, name: str, causal: bool, masked: bool, dropout: float,
    by_heads: bool,
) -> Way:  # fmt: skip
    """Return what auto takes for this attention, which is the same on all ranks; the log says why not torch's ring.

    `by_heads`: ranks have what they need to compute some of the heads.
    """
    why = ""
    if q.device.type == "cuda":
        why = why_no_torch_ring(
            q, k, v, length=layout.length, ranks=layout.ranks, causal=causal, masked=masked, dropout=dropout
        )
        if not why:
            return "torch"
    heads, ranks = q.shape[1], layout.ranks
    by_heads = by_heads and not dropout and not why_no_exchange(heads, ranks)
    fewer = by_heads and bytes_beside_gathering(heads, k.shape[1], ranks, q.element_size()) < 1
    way = "ulysses" if fewer else "gather"
    if why:
        tell_once(name, why, way)
    return way


def attend_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    group: dist.ProcessGroup,
    *,
    way: Way,
    name: str,
    causal: bool,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Return the attention of this rank's queries to the whole sequence.

    `mask`: all columns of this rank's rows, of all rows for ulysses; `name`: of the block, for words.
    """
    by = q.shape[-1] ** -0.5 if scale is None else scale
    if way == "ulysses":
        return attend_by_heads(q, k, v, layout, group, causal=causal, mask=mask, dropout=dropout, scale=by)
    if way == "torch":
        masked = mask is not None
        why = why_no_torch_ring(
            q, k, v, length=layout.length, ranks=layout.ranks, causal=causal, masked=masked, dropout=dropout
        )
        if not why:
            return attend_in_torch_ring(q, k, v, group, causal=causal, scale=by)
        raise TaskError(
            f"options.native.attention: torch cannot do the attention of {name}: {why}; leave the option out, and "
            "keys and values are gathered where torch's ring cannot do it"
        )
    if not dropout and not (mask is not None and mask.requires_grad):
        q = q if q.stride(-1) == 1 else q.contiguous()  # as kernels read rows
        settings = _AttentionSettings(_Parts(layout, group, way == "ring"), causal, by, mask)
        return _Attention.apply(q, k, v, settings)  # pyright: ignore[reportReturnType]
    heads = q.shape[1] // k.shape[1]
    k, v = (gather_sequence(t, -2, layout, group).repeat_interleave(heads, 1) for t in (k, v))
    mine = layout.positions(q.device)
    if causal:
        mask = torch.arange(layout.length, device=q.device) <= mine.unsqueeze(-1)
    scores = masked_scores(q, k, mask, causal=False, scale=by)
    weights = share_in_sum(scores, scores.logsumexp(-1, keepdim=True))
    if dropout:  # drawn for the whole, as one process does, and the rows of this rank taken
        drawn = F.dropout(weights.new_ones(*weights.shape[:-2], layout.length, layout.length), dropout)
        weights = weights * drawn.index_select(-2, mine)
    return weights @ v
