"""Parts of a model over ranks, as tables say: blocks over `tensor`, sequences over `tensor` and `context`.

It needs PyTorch alone, and lies beside a script that `unipar export` has written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

ArgumentPlace = int | str
"""Place or name of an argument."""


@dataclass(frozen=True)
class CutPlan:
    """Cuts of blocks of one kind over the ranks of `tensor`; names are those of modules in the block."""

    blocks: Sequence[str] = ()

    columns: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Any])
    """Linear layers whose outputs are cut, with the sizes of groups that are cut each by itself."""

    rows: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Any])
    """Linear layers whose inputs are cut, with the sizes of groups."""

    numbers: Sequence[str] = ()
    """Attributes of modules, as of heads, that are divided by the number of ranks."""

    dropouts: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, Any])
    """Dropout modules that are given a part: its dimension, counted from the right, and its number of groups."""

    attention: bool = False
    """True if attention, whose heads are cut, has dropout of its own."""

    gathers: Mapping[str, ArgumentPlace] = field(default_factory=dict[str, Any])
    """Modules before which parts of a sequence are made whole, with the place or name of the argument."""

    behind: Sequence[str] = ()
    """Modules behind which they are made whole."""

    masks: Sequence[str] = ()
    """Dropout modules that are given parts of a sequence."""

    partial: Sequence[str] = ()
    """Parameters that act on parts of a sequence: their gradients are added up over the ranks."""


class Along(torch.autograd.Function):
    """A way between what all ranks have and parts of it; gradients go another way back."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(*gradients), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class Ranks:
    """Ranks of a group, each of which has a part of something."""

    def __init__(self, group: Any, collectives: Any = dist) -> None:
        self.group, self.collectives = group, collectives
        self.rank, self.size = collectives.get_rank(group), collectives.get_world_size(group)

    def own(self, whole: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return this rank's part of each group along a dimension; the groups have these sizes."""
        return torch.cat([group.chunk(self.size, dim)[self.rank] for group in whole.split(list(sizes), dim)], dim)

    def add(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        x = x.clone(memory_format=torch.contiguous_format)
        self.collectives.all_reduce(x, group=self.group)
        return x

    def enter(self, x: Tensor) -> Any:
        """Return what all ranks have, for matrices of which each has a part: gradients are added up."""
        return Along.apply(x, _same, self.add)

    def leave(self, products: Tensor) -> Any:
        """Return the sum of the products of parts, with which all ranks do the same."""
        return Along.apply(products, self.add, _same)


class Positions:
    """A sequence of which each rank has a part: the first ones one position more than others, if it does not divide."""

    def __init__(self, ranks: Ranks, length: int) -> None:
        self.ranks, self.length = ranks, length
        self.counts = [length // ranks.size + (rank < length % ranks.size) for rank in range(ranks.size)]

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of the whole."""
        part = whole.tensor_split(self.ranks.size, dim)[self.ranks.rank]
        return part.clone(memory_format=torch.contiguous_format)

    def join(self, part: Tensor, dim: int = 1) -> Tensor:
        """Return the whole of all parts."""
        part = self._padded(part, dim)
        parts = [torch.empty_like(part) for _ in self.counts]
        self.ranks.collectives.all_gather(parts, part, group=self.ranks.group)
        return torch.cat([x.narrow(dim, 0, count) for x, count in zip(parts, self.counts, strict=True)], dim)

    def add(self, partial: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        parts = [self._padded(x, dim) for x in partial.tensor_split(self.ranks.size, dim)]
        part = torch.empty_like(parts[0])
        self.ranks.collectives.reduce_scatter(part, parts, group=self.ranks.group)
        return part.narrow(dim, 0, self.counts[self.ranks.rank]).contiguous()

    def _padded(self, x: Tensor, dim: int) -> Tensor:
        return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, self.counts[0] - x.shape[dim]]).contiguous()

    def enter(self, whole: Tensor) -> Any:
        """Return this rank's part of what all ranks have."""
        return Along.apply(whole, self.own, self.join)

    def leave(self, part: Tensor) -> Any:
        """Return the whole of all parts, with which all ranks do the same."""
        return Along.apply(part, self.join, self.own)

    def gather(self, part: Tensor, dim: int = 1) -> Any:
        """Return the whole of all parts, with which each rank does something else: gradients are added up."""
        return Along.apply(part, partial(self.join, dim=dim), partial(self.add, dim=dim))

    def scatter(self, products: Tensor) -> Any:
        """Return this rank's part of the sum of the products of parts."""
        return Along.apply(products, self.add, self.join)


class Blocks:
    """Blocks of a model, cut over the ranks of `tensor`: each computes a part of what lies between columns and rows."""

    def __init__(self, ranks: Ranks, plans: Sequence[CutPlan], hidden: ArgumentPlace | None = None) -> None:
        """`hidden`: place or name of a block's hidden states, if these are in parts along the sequence as well."""
        self.ranks, self.plans, self.hidden = ranks, plans, hidden
        self.span = Positions(ranks, 0)
        self.cut, self.partial = set[str](), set[str]()
        """Names of parameters of which a rank has a part, and of those that act on parts of sequences."""

        self._taken: tuple[Any, Any] = (None, None)

    def cut_blocks(self, model: nn.Module) -> None:
        """Keep this rank's parts, and let blocks compute with them."""
        for plan in self.plans:
            for name in plan.blocks:
                self._cut_block(name, model.get_submodule(name), plan)

    def _cut_block(self, name: str, block: nn.Module, plan: CutPlan) -> None:
        for layer, sizes in plan.columns.items():
            module: Any = block.get_submodule(layer)
            transposed = hasattr(module, "nf")  # a Conv1D of transformers has the input first
            for key, p in [*module.named_parameters()]:
                own = self.ranks.own(p.detach(), -1 if transposed else 0, sizes)
                self._keep(f"{name}.{layer}.{key}", module, key, own)
            if transposed:
                module.nf //= self.ranks.size
        for layer, sizes in plan.rows.items():
            module = block.get_submodule(layer)
            own = self.ranks.own(module.weight.detach(), 0 if hasattr(module, "nf") else 1, sizes)
            self._keep(f"{name}.{layer}.weight", module, "weight", own)
            module.forward = partial(self._multiply_row, module)
        for number in plan.numbers:
            owner, _, attribute = number.rpartition(".")
            module = block.get_submodule(owner)
            setattr(module, attribute, getattr(module, attribute) // self.ranks.size)
        for layer, (dim, groups) in plan.dropouts.items():
            module = block.get_submodule(layer)
            module.forward = partial(self._drop_part, module, dim, groups)
        for layer in plan.masks:
            module = block.get_submodule(layer)
            module.forward = partial(self._drop_along, module)
        for layer, place in (dict.fromkeys(plan.columns, 0) if self.hidden is None else plan.gathers).items():
            _change_before(block.get_submodule(layer), place, self._whole)
        for layer in plan.behind:
            block.get_submodule(layer).register_forward_hook(self._whole_output)
        self.partial |= {f"{name}.{key}" for key in plan.partial}

    def cut_words(self, model: nn.Module, embedding: str, head: str, compute: Callable[..., None]) -> None:
        """Keep this rank's words of two modules, and let them compute with these; what several modules share stays one.

        `compute`: function of cut_logits.py.
        """
        reads, scores = (model.get_submodule(name) for name in (embedding, head))
        whole = [*reads.parameters(), *scores.parameters()]
        made: dict[nn.Parameter, nn.Parameter] = {}
        for name, p in [*model.named_parameters(remove_duplicate=False)]:
            if any(p is one for one in whole):
                owner, _, key = name.rpartition(".")
                module = model.get_submodule(owner)
                self._keep(name, module, key, self.ranks.own(p.detach(), 0, [len(p)]))
                setattr(module, key, made.setdefault(p, module.get_parameter(key)))
        compute(reads, scores, len(reads.get_parameter("weight")), self.ranks.group, self.ranks.enter, self.ranks.leave)

    def _keep(self, name: str, module: nn.Module, key: str, part: Tensor) -> None:
        setattr(module, key, nn.Parameter(part, module.get_parameter(key).requires_grad))
        self.cut.add(name)

    def _whole(self, x: Tensor) -> Tensor:
        """Return what cut matrices take, the same for all that take one tensor: its gradients are sent once."""
        if self._taken[0] is not x:
            self._taken = x, self.ranks.enter(x) if self.hidden is None else self.span.gather(x)
        return self._taken[1]

    def _whole_output(self, module: nn.Module, args: Any, out: Any) -> Tensor:
        return self._whole(out)

    def _multiply_row(self, layer: Any, x: Tensor) -> Tensor:
        """Add up the products of parts over the ranks; then comes the bias."""
        out = F.linear(x, layer.weight.T if hasattr(layer, "nf") else layer.weight)
        out = self.ranks.leave(out) if self.hidden is None else self.span.scatter(out)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    def _drop_part(self, dropout: Any, dim: int, groups: int, x: Tensor) -> Tensor:
        shape = [*x.shape]
        shape[dim] *= self.ranks.size
        return _drop(dropout, x, shape, lambda mask: self.ranks.own(mask, dim, [shape[dim] // groups] * groups))

    def _drop_along(self, dropout: Any, x: Tensor) -> Tensor:
        return _drop(dropout, x, [len(x), self.span.length, x.shape[-1]], self.span.own)

    def between(self, model: nn.Module, names: Sequence[str]) -> None:
        """Let hidden states be in parts from the first of these blocks to the last; after FSDP's own hooks."""
        assert self.hidden is not None
        _change_before(model.get_submodule(names[0]), self.hidden, self._begin)
        _change_behind(model.get_submodule(names[-1]), lambda hidden: self.span.leave(hidden))

    def _begin(self, hidden: Tensor) -> Tensor:
        self.span = Positions(self.ranks, hidden.shape[1])
        return self.span.enter(hidden)


class Sequences:
    """Sequences, cut over the ranks of `context` from the first block to the last; all else sees them whole."""

    def __init__(self, ranks: Ranks, hidden: ArgumentPlace, arguments: Mapping[ArgumentPlace, int | None]) -> None:
        """`hidden`: place or name of a block's hidden states; `arguments`: dimension of positions in all others."""
        self.ranks, self.hidden, self.arguments = ranks, hidden, arguments
        self.span = Positions(ranks, 0)

    def between(self, model: nn.Module, names: Sequence[str]) -> None:
        """Cut what these blocks are given; after FSDP's own hooks."""
        _change_before(model.get_submodule(names[0]), self.hidden, self._begin)
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(self._take_arguments, with_kwargs=True)
        _change_behind(model.get_submodule(names[-1]), lambda hidden: self.span.gather(hidden))

    def _begin(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1] < self.ranks.size:
            raise SystemExit(f"a sequence of {hidden.shape[1]} cannot be cut over {self.ranks.size} ranks")
        self.span = Positions(self.ranks, hidden.shape[1])
        return self.span.own(hidden)

    def _take_arguments(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        args = tuple(value if i == self.hidden else self._argument(i, value) for i, value in enumerate(args))
        return args, {key: v if key == self.hidden else self._argument(key, v) for key, v in kwargs.items()}

    def _argument(self, name: ArgumentPlace, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._argument(name, inner) for inner in value)
        if not isinstance(value, Tensor):
            return value
        if name not in self.arguments:
            raise SystemExit(f"argument {name} of a block has the shape {tuple(value.shape)}: add it to ARGUMENTS")
        dim = self.arguments[name]
        return value if dim is None else self.span.own(value, dim)


def _change_before(module: nn.Module, place: ArgumentPlace, change: Callable[[Tensor], Tensor]) -> None:
    """Change one argument of each call of a module."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if isinstance(place, str):
            return args, {**kwargs, place: change(kwargs[place])}
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _change_behind(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module puts out, or the first item of it, before other hooks see it."""

    def hook(_: nn.Module, args: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    module.register_forward_hook(hook, prepend=True)


def _drop(dropout: Any, x: Tensor, shape: Sequence[int], own: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw the mask of all ranks, as one process does, and take this rank's part."""
    if not dropout.training or dropout.p == 0.0:
        return x
    return x * own(F.dropout(x.new_ones(shape), dropout.p))


class Inside(TorchFunctionMode):
    """Surroundings of a block: attention sees the whole sequence, and masks of dropout are those of one process."""

    def __init__(self, heads: Ranks | None, sequences: Sequences | None) -> None:
        """`heads`: ranks over which heads are cut; `sequences`: which positions this rank has."""
        super().__init__()
        self.heads, self.sequences = heads, sequences

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward."""
        with self:
            return forward(*args, **kwargs)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is F.dropout and self.sequences is not None:
            return self.drop(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(
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
        """Return what F.scaled_dot_product_attention returns for this rank's heads and positions."""
        span = None if self.sequences is None else self.sequences.span
        if span is not None:
            width = key.shape[-1]
            both = span.gather(torch.cat([key, value], -1), key.ndim - 2)
            key, value = both[..., :width], both[..., width:]
            if is_causal:
                every = torch.arange(span.length, device=query.device)
                attn_mask, is_causal = every <= span.own(every, 0).unsqueeze(-1), False
            elif attn_mask is not None and attn_mask.ndim > 1 and attn_mask.shape[-2] == span.length:
                attn_mask = span.own(attn_mask, -2)
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            allowed = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if allowed else scores + attn_mask
        weights = scores.softmax(-1).nan_to_num(0.0)  # rows that may see nothing
        shape = [*weights.shape]
        shape[-3] *= 1 if self.heads is None else self.heads.size
        shape[-2] = shape[-2] if span is None else span.length
        mask = F.dropout(weights.new_ones(shape), dropout_p)
        mask = mask if self.heads is None else self.heads.own(mask, -3, [shape[-3]])
        mask = mask if span is None else span.own(mask, -2)
        return (weights * mask).to(value.dtype) @ value

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Draw the mask of all positions, as one process does, and take this rank's part."""
        assert self.sequences is not None
        if not training or p == 0.0:
            return x
        span = self.sequences.span
        return x * span.own(F.dropout(x.new_ones(len(x), span.length, *x.shape[2:]), p))


def surround(
    model: nn.Module, names: Sequence[str], blocks: Blocks | None = None, sequences: Sequences | None = None
) -> None:
    """Give blocks surroundings where their heads are cut and attention has dropout, or where sequences are cut."""
    plans = () if blocks is None else blocks.plans
    heads = {name: blocks and blocks.ranks for plan in plans if plan.attention for name in plan.blocks}
    for name in names:
        if sequences is not None or name in heads:
            block: Any = model.get_submodule(name)
            block.forward = partial(Inside(heads.get(name), sequences).run, block.forward)
