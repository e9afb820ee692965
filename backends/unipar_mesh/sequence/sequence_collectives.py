"""The four operations between a whole sequence and the ranks' parts of it, and an input that backward gathers again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from unipar.model.activation_offload import hooks_of_saved_tensors

_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or vars(dist)["all_gather_into_tensor"]  # before torch 2.13
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or vars(dist)["reduce_scatter_tensor"]
_unseen: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage] - a plan's mode has no part here


@dataclass(frozen=True)
class Span:
    """Part of a sequence that a rank has: the parts are equally long, the last ones shorter, or empty."""

    length: int
    ranks: int
    rank: int
    group: dist.ProcessGroup | None
    """Group of these ranks; None in a rehearsal on tensors without values."""

    @property
    def each(self) -> int:
        """Length of the first part."""
        return -(-self.length // self.ranks)

    @property
    def start(self) -> int:
        """First position of this part."""
        return min(self.rank * self.each, self.length)

    @property
    def count(self) -> int:
        """Length of this part."""
        return min(self.each, self.length - self.start)

    def part(self, full: Tensor, dim: int) -> Tensor:
        """Return this part of a whole tensor, in memory of its own, laid out as the whole is."""
        return full.narrow(dim, self.start, self.count).clone()


def _order_of_memory(x: Tensor) -> list[int]:
    return sorted(range(x.ndim), key=lambda d: (-x.stride(d), d))


def _back(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros([missing if d == dim else n for d, n in enumerate(x.shape)])], dim)


def gather_parts(part: Tensor, dim: int, span: Span) -> Tensor:
    """Return the whole, laid out in memory as the parts are; outside of autograd."""
    order = _order_of_memory(part)
    along = order.index(dim)
    mine = part.permute(order)
    full_shape = [span.length if d == along else n for d, n in enumerate(mine.shape)]
    if span.group is None:
        return part.new_empty(full_shape).permute(_back(order))
    mine = _padded(mine, along, span.each)
    parts = mine.new_empty(span.ranks, *mine.shape)
    _ALL_GATHER(parts.view(-1), mine.view(-1), group=span.group)
    if math.prod(mine.shape[:along]) == 1:
        joined = parts.view(*mine.shape[:along], -1, *mine.shape[along + 1 :])
    else:
        joined = torch.cat(parts.unbind(0), along)
    return joined.narrow(along, 0, span.length).contiguous().permute(_back(order))


def add_parts(partial: Tensor, dim: int, span: Span) -> Tensor:
    """Return this rank's part of the sum over the ranks; outside of autograd."""
    order = _order_of_memory(partial)
    along = order.index(dim)
    mine = partial.permute(order)
    if span.group is not None:
        mine = _padded(mine, along, span.each * span.ranks)
        shape = [span.each if d == along else n for d, n in enumerate(mine.shape)]
        rows = mine if math.prod(mine.shape[:along]) == 1 else torch.stack(mine.split(span.each, along))
        out = mine.new_empty(shape)
        _REDUCE_SCATTER(out.view(-1), rows.view(-1), group=span.group)
        return out.narrow(along, 0, span.count).contiguous().permute(_back(order))
    return mine.narrow(along, span.start, span.count).contiguous().permute(_back(order))


_Way = Callable[[Tensor, int, Span], Tensor]


def _part(x: Tensor, dim: int, span: Span) -> Tensor:
    return span.part(x, dim)


class _Along(torch.autograd.Function):
    """One way between whole and parts; backward goes the other way."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, dim: int, span: Span, there: _Way, back: _Way) -> Tensor:
        ctx.dim, ctx.span, ctx.back = dim, span, back
        with _unseen():
            return there(x, dim, span)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0], ctx.dim, ctx.span), None, None, None, None


class _Gather(torch.autograd.Function):
    """The whole for cut matrices, each rank's own; backward adds up over ranks, in the part's dtype."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, dim: int, span: Span, dtype: torch.dtype, keeps_part: bool) -> Tensor:
        ctx.dim, ctx.span, ctx.dtype = dim, span, x.dtype
        if keeps_part:
            ctx.save_for_backward(x)  # it stays anyway, to be gathered again: so autograd knows of it
        with _unseen():
            return gather_parts(x.to(dtype), dim, span)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return add_parts(grads[0].to(ctx.dtype), ctx.dim, ctx.span), None, None, None, None


def split_sequence(x: Tensor, dim: int, span: Span) -> Tensor:
    """Return this rank's part of what all ranks have alike."""
    return _Along.apply(x, dim % x.ndim, span, _part, gather_parts)  # pyright: ignore[reportReturnType]


def join_sequence(part: Tensor, dim: int, span: Span) -> Tensor:
    """Return the whole of the ranks' parts, with which all ranks do the same."""
    return _Along.apply(part, dim % part.ndim, span, gather_parts, _part)  # pyright: ignore[reportReturnType]


def scatter_sum(partial: Tensor, dim: int, span: Span) -> Tensor:
    """Return this rank's part of the sum of partial results over the ranks."""
    return _Along.apply(partial, dim % partial.ndim, span, add_parts, gather_parts)  # pyright: ignore[reportReturnType]


@final
class GatheredInput:
    """Whole input of cut matrices, made of the ranks' parts; for the backward the part is kept, and gathered again."""

    def __init__(self, part: Tensor, dim: int, span: Span, *, keep: bool) -> None:
        """`keep`: let autograd keep the whole, as in a block that is recomputed, where nothing is kept long."""
        dtype = part.dtype
        kind = part.device.type
        if kind != "meta" and dtype != torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # that of the product, which is less to send
        again = not keep and span.group is not None
        self.whole: Tensor = _Gather.apply(part, dim % part.ndim, span, dtype, again)  # pyright: ignore[reportAttributeAccessIssue]
        self._again = _Again(part.detach(), dim % part.ndim, span, dtype) if again else None

    def use(self, product: Callable[[Tensor], Any]) -> Any:
        """Return what a function makes of the whole."""
        if self._again is None:
            return product(self.whole)
        outer = hooks_of_saved_tensors(False)
        with saved_tensors_hooks(_packing(self._again, self.whole, outer), partial(_unpack, outer)):
            return product(self.whole)


def _packing(again: _Again, full: Tensor, outer: Any) -> Callable[[Tensor], Any]:
    """Return a function that puts the way to gather it again in the place of the whole, which it does not keep.

    All else is for the hooks around these, which torch would not call.
    """
    memory, dtype = _storage_of(full), full.dtype

    def pack(x: Tensor) -> Any:
        if _storage_of(x) != memory or x.dtype != dtype or not x.numel():
            return x if outer is None else (outer[0](x),)
        again.kept += 1
        return again, x.shape, x.stride(), x.storage_offset()

    return pack


def _storage_of(x: Tensor) -> int:
    """Return what identifies the storage of a tensor while it lives; fake tensors have no address."""
    storage: Any = x.untyped_storage()
    return storage._cdata


def _unpack(outer: Any, packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if len(packed) == 1:
        return outer[1](packed[0])
    again, shape, stride, offset = packed
    return again.whole().as_strided(shape, stride, offset)


@final
class _Again:
    """Part of an input from which the whole is gathered once more, for all matrices that took it."""

    def __init__(self, part: Tensor, dim: int, span: Span, dtype: torch.dtype) -> None:
        self._part, self._dim, self._span, self._dtype = part, dim, span, dtype
        self._full: Tensor | None = None
        self._used = self.kept = 0

    def whole(self) -> Tensor:
        """Return the whole; it is let go when as many have taken it as keep it."""
        full = self._full
        if full is None:
            full = self._full = gather_parts(self._part.to(self._dtype), self._dim, self._span)
        self._used += 1
        if self._used >= self.kept:
            self._used, self._full = 0, None
        return full
