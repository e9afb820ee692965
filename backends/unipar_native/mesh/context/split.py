"""Hooks that cut a sequence over ranks where the first block takes it, and gather it behind the last block.

Embeddings, head, loss and metrics see whole sequences. Inside blocks every rank has its positions only, and
`scaled_dot_product_attention` reaches those of all ranks. Each rank's gradients are a part: over the group they are
summed, and the loss is scaled by 1 / ranks, because behind the last block every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from unipar.errors import TaskError
from unipar.model import transforms
from unipar_native.mesh.context.arguments import Arguments, position_dimension
from unipar_native.mesh.context.attention import SequenceLayout, Way, attend_over_ranks, gather_sequence
from unipar_native.mesh.context.trial import examine

RANDOM: frozenset[Any] = frozenset(
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


@final
class SequenceSplit:
    """Cuts the sequence of a model's blocks over a group of ranks, all of which run the same pass together."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        group: dist.ProcessGroup,
        *,
        enters: bool = True,
        leaves: bool = True,
        attention: Way = "gather",
    ) -> None:
        """Take the blocks of this rank, in the order in which they run.

        `enters`: the first of them takes whole hidden states, which are cut; if not, it takes this rank's part, and
        `whole_length` tells the length. `leaves`: the last of them puts out whole hidden states.
        """
        if not blocks:
            raise TaskError(
                f"parallel.context: {group.size()} cuts sequences between the first block and the last, and the model "
                "has no blocks: name them in model.blocks or in the task's blocks()"
            )
        self.names, self.blocks = list(blocks), [model.get_submodule(name) for name in blocks]
        self.group, self.enters, self.leaves = group, enters, leaves
        self.attention: Way = attention
        self.whole_length = 0
        """Length of the whole sequence, told before each pass where `enters` is false."""

        self._examined: set[tuple[str, bool]] = set()
        self._run: Pass | None = None
        self._inside: InsideBlock | None = None
        self._handles: list[RemovableHandle] = []
        self._plain: list[Callable[..., Any] | None] = []

    def arm(self) -> None:
        """Put hooks on the blocks and replace their forward; engines call it after their library's hooks are on."""
        for index, (name, block) in enumerate(zip(self.names, self.blocks, strict=True)):
            if getattr(block, "gradient_checkpointing", False):
                raise TaskError(
                    f"parallel.context: {name} recomputes its forward by itself (gradient_checkpointing), where its "
                    "attention would see this rank's part only: leave that out, and set model.recompute: blocks"
                )
            if hasattr(block.forward, "_torchdynamo_orig_callable"):
                raise TaskError(
                    f"parallel.context: {name} is compiled, and compiled attention cannot be cut over ranks: leave "
                    "model.compile out"
                )
            self._plain.append(vars(block).get("forward"))
            self._handles.append(block.register_forward_pre_hook(self._enter(index), with_kwargs=True))
            block.forward = self._forward(index, block.forward)
        transforms.SURROUNDINGS.append(self._again)

    def disarm(self) -> None:
        """Take hooks and forwards away again."""
        for handle in self._handles:
            handle.remove()
        for block, plain in zip(self.blocks, self._plain, strict=False):
            del block.forward
            if plain is not None:
                block.forward = plain
        if self._again in transforms.SURROUNDINGS:
            transforms.SURROUNDINGS.remove(self._again)
        self._handles, self._plain, self._run = [], [], None

    def layout(self, length: int) -> SequenceLayout:
        """Return which rank has which positions of a sequence of this length."""
        ranks = self.group.size()
        if length < ranks:
            raise TaskError(
                f"parallel.context: a sequence of {length} cannot be cut over {ranks} ranks: leave out sequences "
                "shorter than that, or take fewer ranks"
            )
        return SequenceLayout(length, ranks, self.group.rank())

    def _enter(self, index: int) -> Callable[..., Any]:
        """Return the hook that cuts what a block is given."""
        name = self.names[index]

        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = Arguments(name, block, args, kwargs)
            hidden = given.hidden
            if index == 0:
                if self._run is not None:
                    raise self._out_of_order(name)
                length = hidden.shape[1] if self.enters else self.whole_length
                self._run = Pass(self.layout(length), hidden.shape[0])
            run = self._run
            if run is None or run.due != index:
                raise self._out_of_order(name)
            whole = index == 0 and self.enters
            if not whole and hidden.shape[1] != run.layout.count():
                raise TaskError(
                    f"parallel.context: {name} is given {hidden.shape[1]} positions where this rank has "
                    f"{run.layout.count()} of {run.layout.length}: between the first block and the last, hidden states "
                    "must go from block to block"
                )

            def cut(tensor: Tensor, where: str) -> Tensor:
                if tensor is hidden:
                    return self._cut(run, tensor, 1) if whole else tensor
                if any(tensor is other for other in run.ours):
                    return tensor
                dimension = position_dimension(tensor, hidden, run.layout, where)
                return tensor if dimension is None else self._cut(run, tensor, dimension)

            return given.changed(cut)

        return hook

    def _cut(self, run: Pass, tensor: Tensor, dimension: int) -> Tensor:
        key = (id(tensor), dimension)
        if key not in run.cut:
            run.cut[key] = (tensor, tensor.index_select(dimension, run.layout.positions(tensor.device)))
        return run.cut[key][1]

    def _forward(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's forward with attention over ranks; the last one's result is gathered."""
        name, last = self.names[index], index == len(self.names) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            assert run is not None
            try:
                self._examine(index, plain, args, kwargs)
                self._inside = InsideBlock(self, name, run)
                with self._inside:
                    result = plain(*args, **kwargs)
                hidden = _hidden_of(name, result, run.layout)
            except BaseException:
                self._run = None
                raise
            finally:
                self._inside = None
            if not last:
                run.due, run.ours = index + 1, [t for t in _items(result) if isinstance(t, Tensor)]
                return result
            self._run = None
            if not self.leaves:
                return result
            whole = gather_sequence(hidden, 1, run.layout, self.group)
            return (whole, *result[1:]) if isinstance(result, tuple) else whole

        return forward

    def _examine(self, index: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a TaskError if the block cannot run on a part of the sequence; each block is looked at once."""
        name, block, run = self.names[index], self.blocks[index], self._run
        assert run is not None
        if (name, block.training) in self._examined or run.layout.ranks == 1:
            return

        def dimension(tensor: Tensor) -> int | None:
            for (_, along), (_, part) in run.cut.items():
                if part is tensor or part.shape == tensor.shape:  # FSDP2 may have cast it
                    return along
            return 1 if any(tensor is other for other in run.ours) and tensor.dim() == 3 else None

        given = Arguments(name, block, args, kwargs)
        if examine(given, block, plain, run.layout, dimension, lambda: InsideBlock(self, name, run, trial=True)):
            self._examined.add((name, block.training))

    def _again(self) -> AbstractContextManager[Any]:
        """Return what a block's forward needs around it when it is run once more, as it is around it now."""
        inside = self._inside
        return nullcontext() if inside is None else InsideBlock(self, inside.name, inside.run)

    def _out_of_order(self, name: str) -> TaskError:
        due = self.names[self._run.due if self._run is not None else 0]
        return TaskError(
            f"parallel.context: {name} came where {due} was due: between the first block and the last, the loss must "
            "call each block once, in order"
        )


@final
class InsideBlock(TorchFunctionMode):
    """Attention over all ranks, and dropout as one process draws it, while a block runs."""

    def __init__(self, split: SequenceSplit, name: str, run: Pass, *, trial: bool = False) -> None:
        """`trial`: attention and dropout give something of each position alone."""
        super().__init__()
        self.split, self.name, self.run, self.trial = split, name, run, trial

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        if func in (F.dropout, torch.dropout, torch.dropout_):
            return self._dropout(func, *args, **kwargs)
        if func in RANDOM:
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
        layout = self.run.layout
        n, whole = layout.count(), layout.length
        if query.dim() != 4 or query.shape[-2] != n:
            raise TaskError(
                f"parallel.context: {self.name} calls attention with queries of shape {tuple(query.shape)}, where "
                f"(batch, heads, {n}, width) was expected: its hidden states must be (batch, sequence, width), "
                "and attention must go along the sequence"
            )
        if key.shape[-2] != n:  # keys of another sequence, whole on each rank
            if is_causal or dropout_p:
                raise TaskError(
                    f"parallel.context: {self.name} attends from {n} of {whole} positions to {key.shape[-2]} keys of "
                    f"another sequence, {'causally' if is_causal else 'with dropout'}: that cannot be cut over ranks"
                )
            return F.scaled_dot_product_attention(
                query, key, value, self._rows(attn_mask), scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.shape[-1] not in (1, whole):
            raise TaskError(
                f"parallel.context: {self.name} makes a mask of {attn_mask.shape[-1]} columns from its own {n} of "
                f"{whole} positions: pass is_causal=True to scaled_dot_product_attention, or make the mask before the "
                "blocks and pass it to them"
            )
        if dropout_p and query.device.type != "cpu":
            raise TaskError(
                f"parallel.context: {self.name} has dropout inside attention ({dropout_p:g}), which this device draws "
                "inside its kernel, not as one process would: set the model's attention dropout to 0"
            )
        if self.trial:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
            return value * (1.0 + (query + key).sum(-1, keepdim=True))
        return attend_over_ranks(
            query,
            key,
            value,
            layout,
            self.split.group,
            way=self.split.attention,
            causal=is_causal,
            mask=self._rows(attn_mask),
            dropout=dropout_p,
            scale=scale,
        )

    def _rows(self, mask: Tensor | None) -> Tensor | None:
        """Return the rows of a mask that are this rank's; rows were cut where the mask was an argument of the block."""
        if mask is None or mask.dim() < 2 or mask.shape[-2] in (1, self.run.layout.count()):
            return mask
        return mask.index_select(-2, self.run.layout.positions(mask.device))

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
                    "which one is cut cannot be told; take another length"
                )
        return None


def _hidden_of(name: str, result: Any, layout: SequenceLayout) -> Tensor:
    """Return the hidden states that a block puts out, this rank's part."""
    hidden = result[0] if isinstance(result, tuple) else result
    if isinstance(hidden, Tensor) and hidden.dim() == 3 and hidden.shape[1] == layout.count():
        return hidden
    shown = f"a tensor of shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
    raise TaskError(
        f"parallel.context: {name} puts out {shown}, where hidden states of {layout.count()} positions were expected "
        "(batch, sequence, width)"
    )


def _items(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple) else (result,)
