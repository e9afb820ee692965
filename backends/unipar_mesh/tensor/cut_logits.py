"""Logits of some words, which pass for those of all words, and a cross entropy that never gathers them.

It needs PyTorch alone: exported scripts have a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from unipar_mesh.tensor.subclass import as_subclass

_plainly: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]


def compute_on_words(
    embedding: Any,
    head: Any,
    each: int,
    group: dist.ProcessGroup,
    enter: Callable[[Tensor], Tensor],
    leave: Callable[[Tensor], Tensor],
) -> None:
    """Make modules whose parameters are this rank's words, as many on each rank, compute what the whole ones do.

    `enter` and `leave` bring the head's input to all ranks, and add up what they read. The head's output is this rank's
    logits.
    """
    first, scored = each * dist.get_rank(group), head.forward
    padding = None if embedding.padding_idx is None else embedding.padding_idx - first
    if padding is not None and not 0 <= padding < each:
        padding = None

    def read(ids: Tensor) -> Tensor:
        here = (ids >= first) & (ids < first + each)
        rows = F.embedding((ids - first).where(here, 0), embedding.weight, padding)
        return leave(rows.masked_fill(here.logical_not().unsqueeze(-1), 0.0))

    def score(x: Tensor) -> Tensor:
        return CutLogits.of(scored(enter(x)), -1, group)

    embedding.forward, head.forward = read, score


class CutLogits(Tensor):
    """Logits of this rank's words, which pass for those of all words.

    Shapes are those of the whole. Cross entropy adds up over the ranks; whatever else is asked of them gathers them
    first, and is what it is on one process.
    """

    _dim: int
    _group: dist.ProcessGroup

    @staticmethod
    def of(local: Tensor, dim: int, group: dist.ProcessGroup) -> Any:
        """Return the logits of which these are a part along `dim`."""
        made = as_subclass(local, CutLogits)
        made._dim, made._group = dim % local.ndim, group
        return made

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        x = args[0] if args and isinstance(args[0], CutLogits) else kwargs.get("input")
        if isinstance(x, CutLogits):
            if name == "__get__":
                name = getattr(func.__self__, "__name__", name)
                if name not in ("shape", "T", "mT", "data"):
                    with _plainly():
                        return func(*args, **kwargs)  # dtype, device, grad_fn
            made = _on_part(name, func, x, args, kwargs)
            if made is not None:
                return made
        args = tuple(_gathered(a) for a in args)
        kwargs = {k: _gathered(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


_KEEP = {"float", "double", "half", "bfloat16", "to", "contiguous", "clone", "type", "detach", "requires_grad_"}
_HOOKS = {"register_hook", "retain_grad", "backward", "__hash__", "__repr__", "requires_grad_"}


def _on_part(name: str, func: Any, x: CutLogits, args: Any, kwargs: Any) -> Any:
    """Return what a call makes of the part; None if it needs the whole."""
    local, dim, group = _local(x), x._dim, x._group  # pyright: ignore[reportPrivateUsage]
    full_shape = [n * dist.get_world_size(group) if d == dim else n for d, n in enumerate(local.shape)]
    rest = args[1:]
    if name in ("size", "shape"):
        along = kwargs.get("dim", rest[0] if rest else None)
        return torch.Size(full_shape) if along is None else full_shape[along]
    if name in ("dim", "ndimension"):
        return local.ndim
    if name == "numel":
        return torch.Size(full_shape).numel()
    if name in _HOOKS:
        with _plainly():
            return func(*args, **kwargs)
    if name in _KEEP:
        return CutLogits.of(func(local, *rest, **kwargs), dim, group)
    if name == "transpose" and len(rest) == 2:
        a, b = (d % local.ndim for d in rest)
        return CutLogits.of(local.transpose(a, b), {a: b, b: a}.get(dim, dim), group)
    if name == "cross_entropy":
        return _cross_entropy(local, dim, group, full_shape[dim], rest, kwargs)
    if dim != local.ndim - 1:
        return None
    if name in ("view", "reshape", "flatten"):
        shape = torch.empty(full_shape, device="meta")
        try:
            shape = list(func(shape, *rest, **kwargs).shape)
        except (RuntimeError, TypeError):
            return None
        if shape[-1] != full_shape[-1]:
            return None
        return CutLogits.of(local.reshape(*shape[:-1], local.shape[-1]), -1, group)
    if name == "__getitem__":
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        plain = all(isinstance(i, int | slice) or i is Ellipsis for i in index)
        used = len([i for i in index if i is not Ellipsis])
        if plain and (used < local.ndim or index[-1] == slice(None)):
            return CutLogits.of(local[index], -1, group)
    return None


def _local(x: CutLogits) -> Tensor:
    with _plainly():
        return x.as_subclass(Tensor)


def _gathered(value: Any) -> Any:
    if isinstance(value, CutLogits):
        return _Gather.apply(_local(value), value._dim, value._group)  # pyright: ignore[reportPrivateUsage]
    return type(value)(_gathered(v) for v in value) if type(value) in (list, tuple) else value


@final
class _Gather(torch.autograd.Function):
    """The logits of all words; every rank goes on with the same, so backward is this rank's part."""

    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.each, ctx.first = dim, local.shape[dim], local.shape[dim] * dist.get_rank(group)
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(ctx.dim, ctx.first, ctx.each), None, None


def _cross_entropy(local: Tensor, dim: int, group: Any, words: int, rest: Any, kwargs: Any) -> Tensor | None:
    """Return F.cross_entropy of logits in parts; None for options that need them whole."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments: dict[str, Any] = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None}
    arguments |= {"reduction": "mean", "label_smoothing": 0.0, **dict(zip(names, rest, strict=False)), **kwargs}
    target: Tensor = arguments["target"]
    classes = 0 if local.ndim == 1 else 1
    legacy = arguments["weight"] is not None or arguments["size_average"] is not None or arguments["reduce"] is not None
    if legacy or target.is_floating_point() or dim != classes or arguments["reduction"] not in ("none", "mean", "sum"):
        return None
    if torch.is_autocast_enabled(local.device.type) and local.dtype != torch.float64:
        local = local.float()  # as autocast has it
    rows = local.movedim(classes, -1)
    counted = target != arguments["ignore_index"]
    asked = target.where(counted, 0)
    losses: Any = _CrossEntropy.apply(rows, asked, group, words, float(arguments["label_smoothing"]))
    losses = losses.masked_fill(counted.logical_not(), 0.0)
    match arguments["reduction"]:
        case "none":
            return losses
        case "sum":
            return losses.sum()
        case _:
            return losses.sum() / counted.sum()


@final
class _CrossEntropy(torch.autograd.Function):
    """Loss of each row, from the rows' maxima, sums of exponentials and the scores asked for: three numbers a row."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, target: Tensor, group: Any, words: int, smoothing: float) -> Tensor:
        each = rows.shape[-1]
        first = each * dist.get_rank(group)
        most = rows.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        rows = rows - most.unsqueeze(-1)
        here = (target >= first) & (target < first + each)
        at = (target - first).where(here, 0).unsqueeze(-1)
        asked = rows.gather(-1, at).squeeze(-1).masked_fill(here.logical_not(), 0.0)
        total = rows.sum(-1) if smoothing else torch.zeros_like(asked)
        shares = rows.exp_()
        sums = torch.stack([shares.sum(-1), asked, total])
        dist.all_reduce(sums, group=group)
        exponentials, asked, total = sums.unbind(0)
        log = exponentials.log()
        shares.div_(exponentials.unsqueeze(-1))
        ctx.save_for_backward(shares, at, here)
        ctx.words, ctx.smoothing = words, smoothing
        return (1.0 - smoothing) * (log - asked) + smoothing * (log - total / words)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        shares, at, here = ctx.saved_tensors
        grad = shares - ctx.smoothing / ctx.words
        one = (ctx.smoothing - 1.0) * here.to(grad.dtype)
        grad.scatter_add_(-1, at, one.unsqueeze(-1))
        return grad.mul_(grads[0].unsqueeze(-1)), None, None, None, None
