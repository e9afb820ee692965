"""Torch functions inside a block whose sequence is cut: attention over all ranks, dropout as one process draws it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from unipar.errors import TaskError
from unipar_mesh.context.head_exchange import why_no_exchange
from unipar_mesh.context.sequence_layout import SequenceLayout
from unipar_mesh.context.spread_attention import (
    Choice,
    Way,
    as_computed,
    attend_over_ranks,
    choose_way,
    gather_sequence,
)

RANDOM_FUNCTIONS: frozenset[Any] = frozenset(
    {
        torch.rand_like,
        torch.randn_like,
        torch.bernoulli,
        torch.Tensor.bernoulli,
        torch.Tensor.bernoulli_,
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
    }
)
"""Functions that draw numbers in the shape of a tensor, and are not dropout of single elements."""


DROPOUT_FUNCTIONS: frozenset[Any] = frozenset({F.dropout, torch.dropout, torch.dropout_})
"""Functions that drop single elements."""


@dataclass
class Pass:
    """One forward pass over the blocks: its sequence, and tensors that are cut already."""

    layout: SequenceLayout
    batch: int
    due: int = 0
    """Index of the block that comes next."""

    cut: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cut tensors by identity and dimension of the whole ones, which are kept with them: one copy for all blocks."""

    ours: list[Tensor] = field(default_factory=list)
    """Tensors that the block before has put out: cut already."""

    ways: dict[Hashable, Way] = field(default_factory=dict)
    """Ways of attentions that `auto` has chosen, by block and shapes."""


@final
class InsideBlock(TorchFunctionMode):
    """Attention over all ranks, and dropout as one process draws it, while a block runs."""

    def __init__(
        self, name: str, run: Pass, group: dist.ProcessGroup, attention: Choice, *, trial: bool = False
    ) -> None:
        """`trial`: attention and dropout give something of each position alone."""
        super().__init__()
        self.name, self.run, self.group, self.trial = name, run, group, trial
        self.attention: Choice = attention

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        if func in DROPOUT_FUNCTIONS:
            return self._dropout(func, *args, **kwargs)
        if func in RANDOM_FUNCTIONS:
            tensor = args[0] if args else kwargs.get("input")
            if isinstance(tensor, Tensor) and self._rows_dimension(tensor) is not None:
                raise TaskError(
                    f"parallel.context: {self.name} draws random numbers for its positions "
                    f"({getattr(func, '__name__', func)}); each rank would draw others than one process does: use "
                    "dropout, or draw them before the blocks"
                )
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() == 3:  # one head, without a dimension for it
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(1)
            q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            return self._attention(q, k, v, attn_mask, dropout_p, is_causal, scale).squeeze(1)
        layout = self.run.layout
        n, length = layout.count(), layout.length
        if query.dim() != 4 or query.shape[-2] != n:
            raise TaskError(
                f"parallel.context: {self.name} calls attention with queries of shape {tuple(query.shape)}, where "
                f"(batch, heads, {n}, width) was expected: its hidden states must be (batch, sequence, width), "
                "and attention must go along the sequence"
            )
        if key.shape[-2] != n:  # keys of another sequence, whole on each rank
            if is_causal or dropout_p:
                raise TaskError(
                    f"parallel.context: {self.name} attends from {n} of {length} positions to {key.shape[-2]} keys of "
                    f"another sequence, {'causally' if is_causal else 'with dropout'}: that cannot be split over "
                    "ranks; set "
                    "parallel.context: 1"
                )
            return F.scaled_dot_product_attention(
                query, key, value, self._rows(attn_mask), scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and is_causal:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=True)  # torch's own error
        if attn_mask is not None and attn_mask.shape[-1] not in (1, length):
            raise TaskError(
                f"parallel.context: {self.name} makes a mask of {attn_mask.shape[-1]} columns from its own {n} of "
                f"{length} positions: pass is_causal=True to scaled_dot_product_attention, or make the mask before the "
                "blocks and pass it to them"
            )
        if dropout_p and query.device.type != "cpu":
            raise TaskError(
                f"parallel.context: {self.name} has dropout inside attention ({dropout_p:g}), which this device draws "
                "inside its kernel, not as one process would: set the model's attention dropout to 0"
            )
        if self.attention == "ulysses" and (why := why_no_exchange(query.shape[1], layout.ranks)):
            raise TaskError(
                f"options.native.attention: ulysses cannot do the attention of {self.name}: {why}; say gather or ring"
            )
        if self.trial:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
            return value * (1.0 + (query + key).sum(-1, keepdim=True))
        q, k, v, mask = as_computed(query, key, value, attn_mask)
        known = self._all_rows(attn_mask)
        way = self.attention
        if way == "auto":
            masked, by_heads = mask is not None, known is not None or mask is None
            kind = self.name, q.shape, k.shape, masked
            if kind not in self.run.ways:  # a forward that is run again knows less of masks, and must compute the same
                self.run.ways[kind] = choose_way(
                    q, k, v, layout, name=self.name, causal=is_causal, masked=masked, dropout=dropout_p,
                    by_heads=by_heads,
                )  # fmt: skip
            way = self.run.ways[kind]
        if way != "ulysses" or mask is None:
            mask = self._rows(mask)
        elif known is None:
            mask = self._gathered_rows(mask)
        else:
            (mask,) = as_computed(known)
        return attend_over_ranks(
            q, k, v, layout, self.group, way=way, name=self.name, causal=is_causal, mask=mask, dropout=dropout_p,
            scale=scale,
        )  # fmt: skip

    def _rows(self, mask: Tensor | None) -> Tensor | None:
        """Return the rows of a mask that are this rank's; rows were cut where the mask was an argument of the block."""
        if mask is None or mask.dim() < 2 or mask.shape[-2] in (1, self.run.layout.count()):
            return mask
        return mask.index_select(-2, self.run.layout.positions(mask.device))

    def _all_rows(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask with the rows of all positions, as it was before the cut; None if only a part is known."""
        layout = self.run.layout
        if mask is None or mask.dim() < 2 or mask.shape[-2] == layout.length:
            return mask
        for whole, part in self.run.cut.values():
            if part is mask and whole.shape[-2] == layout.length:
                return whole
        return mask if mask.shape[-2] == 1 and self._fewest > 1 else None

    @property
    def _fewest(self) -> int:
        """Positions of the rank that has fewest."""
        return min(map(self.run.layout.count, range(self.run.layout.ranks)))

    def _gathered_rows(self, mask: Tensor) -> Tensor:
        """Return the mask with the rows of all ranks."""
        layout = self.run.layout
        if self._fewest == 1:
            raise TaskError(
                f"options.native.attention: ulysses cannot tell whether a mask of {self.name} has one row for all of "
                f"{layout.length} positions, where one of {layout.ranks} ranks has one position: take longer "
                "sequences, or say gather or ring"
            )
        return gather_sequence(mask, -2, layout, self.group)

    def _multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call torch's own multi-head attention, whose inner attention a mode does not see."""
        if kwargs.get("key_padding_mask") is not None or (
            kwargs.get("attn_mask") is not None and not kwargs.get("is_causal")
        ):
            raise TaskError(
                f"parallel.context: {self.name} calls torch.nn.MultiheadAttention with a mask, which that checks "
                "against this rank's part: pass is_causal=True, and no padding mask"
            )
        plain = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attention
        try:
            return F.multi_head_attention_forward(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = plain

    def _dropout(self, func: Any, input: Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        training = kwargs.get("training", kwargs.get("train", args[0] if args else True))
        dimension = self._rows_dimension(input) if training and p else None
        if dimension is None:
            return func(input, p, *args, **kwargs)
        if self.trial:
            return input
        layout = self.run.layout
        by_stride = sorted(range(input.dim()), key=input.stride, reverse=True)  # numbers are drawn in memory's order
        shape = list(input.shape)
        flat = dimension == "flat"
        along = 0 if flat else dimension
        shape[along] = shape[along] // layout.count() * layout.length
        ones = torch.ones([shape[d] for d in by_stride], dtype=input.dtype, device=input.device)
        drawn = F.dropout(ones.permute([by_stride.index(d) for d in range(input.dim())]), p)
        mine = layout.positions(input.device)
        if flat:
            kept = drawn.unflatten(0, (-1, layout.length)).index_select(1, mine).flatten(0, 1)
        else:
            kept = drawn.index_select(along, mine)
        inplace = kwargs.get("inplace", len(args) > 1 and args[1]) or func is torch.dropout_
        return input.mul_(kept) if inplace else input * kept

    def _rows_dimension(self, tensor: Tensor) -> int | Literal["flat"] | None:
        """Return the dimension of a tensor inside a block along which this rank has a part, if any."""
        n, batch, shape = self.run.layout.count(), self.run.batch, tuple(tensor.shape)
        if len(shape) == 2 and shape[0] == batch * n:
            return "flat"
        if len(shape) >= 3 and shape[0] == batch:
            along = [d for d in (1, 2) if shape[d] == n and d < max(2, len(shape) - 1)]
            if len(along) == 1:
                return along[0]
            if len(along) == 2:
                raise TaskError(
                    f"parallel.context: {self.name} draws random numbers for a tensor of shape {shape}, and two of its "
                    f"dimensions are as long as this rank's part of the sequence ({n} of {self.run.layout.length}): "
                    "which one is cut is not known; take another length"
                )
        return None


@final
class BetweenBlocks(TorchFunctionMode):
    """Dropout as one process draws it, in the loss: what lies between two blocks has a part of the sequence, too."""

    def __init__(self, find: Callable[[], InsideBlock | None]) -> None:
        """`find` returns what a block would have around it, or None outside of the blocks' pass."""
        super().__init__()
        self._find = find

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (func in DROPOUT_FUNCTIONS or func in RANDOM_FUNCTIONS) and (between := self._find()) is not None:
            return between.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
