"""Hidden states of which a rank has a part: a tensor that passes for the whole, and what a block does with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from typing_extensions import override

from unipar.errors import TaskError
from unipar_mesh.sequence.sequence_collectives import GatheredInput, Span, join_sequence, scatter_sum, split_sequence
from unipar_mesh.tensor.cuts import SequencePlan
from unipar_mesh.tensor.subclass import as_subclass

_plainly: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
_ATTRIBUTES_OF_WHOLE = {"shape", "T", "mT", "H", "mH", "data", "real", "imag", "grad"}
_PLAIN = {
    *("register_hook", "retain_grad", "requires_grad_", "__hash__", "dim", "ndimension", "is_floating_point"),
    *("is_complex", "element_size", "get_device", "__set__"),
}  # fmt: skip


class CutSequence(Tensor):
    """Hidden states of this rank's part of the sequence, which pass for those of the whole.

    The next block takes the part. Whatever else is asked of them gathers them first, and is what it is on one process.
    """

    source: Tensor
    """Plain tensor of which it was made."""

    cut_dim: int
    span: Span
    _full: Tensor | None

    @staticmethod
    def of(part: Tensor, dim: int, span: Span) -> CutSequence:
        """Return the hidden states of which this is a part along `dim`."""
        made = as_subclass(part, CutSequence)
        made.source, made.cut_dim, made.span, made._full = part, dim % part.ndim, span, None
        return made

    @property
    def part(self) -> Tensor:
        """This rank's part, a plain tensor; gradients pass here, for the hooks that a library puts on results."""
        with _plainly():
            return self.as_subclass(Tensor)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        x = args[0] if args else None
        if isinstance(x, CutSequence):
            if name == "__get__":
                name = getattr(func.__self__, "__name__", name)
                if name not in _ATTRIBUTES_OF_WHOLE:
                    name = "__hash__"  # dtype, device, grad_fn: as they are
            if name in ("shape", "size"):
                along = kwargs.get("dim", args[1] if len(args) > 1 else None)
                shape = torch.Size(x.span.length if d == x.cut_dim else n for d, n in enumerate(x.source.shape))
                return shape if along is None else shape[along]
            if name in _PLAIN:
                with _plainly():
                    return func(*args, **kwargs)
        args, kwargs = tree_map(joined, (args, kwargs))
        return func(*args, **kwargs)


def joined(x: Any) -> Any:
    """Return the whole of hidden states that are cut; all else as it is."""
    if not isinstance(x, CutSequence):
        return x
    full = x._full  # pyright: ignore[reportPrivateUsage]
    if full is None or (torch.is_grad_enabled() and x.source.requires_grad and not full.requires_grad):
        full = x._full = join_sequence(x.part, x.cut_dim, x.span)  # pyright: ignore[reportPrivateUsage]
    return full


def part_alone(x: Tensor) -> Tensor:
    """Return this rank's part of hidden states that are cut, as a plain tensor; all else as it is."""
    return x.part if isinstance(x, CutSequence) else x


def hidden_place(leaves: list[Any]) -> int | None:
    """Return which of a call's arguments are the hidden states: the first tensor of numbers with two dimensions."""
    for place, value in enumerate(leaves):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return place
    return None


def dim_of_sequence(ndim: int) -> int:
    """Return the dimension along which hidden states are cut: never the last, which is that of channels."""
    return 1 if ndim >= 3 else 0


@final
class BlockParts:
    """Flow of a sequence in parts through one block, in the pass that runs now."""

    def __init__(self, plan: SequencePlan, ranks: int, rank: int, group: dist.ProcessGroup | None) -> None:
        self.plan = plan
        self.keep_wholes = False
        """Whether autograd keeps gathered inputs: in a block that is recomputed they do not live long."""

        self._ranks, self._rank, self._group = ranks, rank, group
        self._span: Span | None = None
        self._known: dict[int, tuple[Tensor, GatheredInput]] = {}

    @property
    def span(self) -> Span:
        """This rank's part of the sequence of this pass."""
        assert self._span is not None
        return self._span

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Return a call's arguments with this rank's part of the hidden states, and all others whole."""
        leaves, spec = tree_flatten((args, kwargs))
        place = hidden_place(leaves)
        if place is None:
            raise TaskError("parallel.sequence: a block is given no hidden states; leave sequence out")
        hidden: Tensor = leaves[place]
        dim = self.plan.dim
        if isinstance(hidden, CutSequence) and hidden.cut_dim == dim:
            self._span, part = hidden.span, hidden.part
        else:
            full: Tensor = joined(hidden)
            self._span = Span(full.shape[dim], self._ranks, self._rank, self._group)
            part = split_sequence(full, dim, self._span)
        return tree_unflatten([part if x is hidden else joined(x) for x in leaves], spec)

    def leave(self, out: Any) -> Any:
        """Return a block's results, of which those that are cut know it."""
        leaves, spec = tree_flatten(out)
        for place in self.plan.outputs:
            leaves[place] = CutSequence.of(leaves[place], self.plan.dim, self.span)
        return tree_unflatten(leaves, spec)

    def clear(self) -> None:
        """Let go of gathered inputs: torch ends a recomputed forward by an error as soon as it has all it needs."""
        self._known.clear()

    def gathered(self, x: Tensor, dim: int) -> GatheredInput:
        """Return the whole of a part that cut matrices take: one for all of them."""
        known = self._known.get(id(x))
        if known is None or known[0] is not x:
            known = self._known[id(x)] = (x, GatheredInput(x, dim, self.span, keep=self.keep_wholes))
        return known[1]

    def scattered(self, partial: Tensor, dim: int) -> Tensor:
        """Return this rank's part of the sum of partial results."""
        return scatter_sum(partial, dim, self.span)


def join_before(block: nn.Module) -> Callable[[], None]:
    """Let a block that takes no parts get whole hidden states; to be called when a library's hooks are on.

    Returns what takes it back.
    """

    def join(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(joined, (args, kwargs))

    return block.register_forward_pre_hook(join, with_kwargs=True, prepend=True).remove


Arrived = tuple[int, int, Span]
"""Place of hidden states among a call's arguments, with the dimension along which they are cut, and the rank's part."""


def unwrap_parts(args: Any, kwargs: Any) -> tuple[Any, Any, Sequence[Arrived]]:
    """Return a call's arguments with parts as plain tensors, and what is known of these."""
    leaves, spec = tree_flatten((args, kwargs))
    arrived: list[Arrived] = []
    for place, x in enumerate(leaves):
        if isinstance(x, CutSequence):
            arrived.append((place, x.cut_dim, x.span))
            leaves[place] = x.part
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs, arrived


def wrap_parts(args: Any, kwargs: Any, arrived: Sequence[Arrived]) -> tuple[Any, Any]:
    """Return a call's arguments with parts that know it again."""
    leaves, spec = tree_flatten((args, kwargs))
    for place, dim, span in arrived:
        leaves[place] = CutSequence.of(leaves[place], dim, span)
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def hook_parts(block: nn.Module) -> list[Callable[[], None]]:
    """Let a library's hooks see plain parts among a block's arguments, as they would lose what is known of them.

    To be called when these hooks are on. Returns what takes it back.
    """
    arrived: list[Sequence[Arrived]] = [()]

    def unwrap(_: nn.Module, args: Any, kwargs: Any) -> Any:
        *call, arrived[0] = unwrap_parts(args, kwargs)
        return tuple(call) if arrived[0] else None

    def wrap(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return wrap_parts(args, kwargs, arrived[0]) if arrived[0] else None

    return [
        block.register_forward_pre_hook(unwrap, with_kwargs=True, prepend=True).remove,
        block.register_forward_pre_hook(wrap, with_kwargs=True).remove,
    ]
