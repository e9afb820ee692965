"""Calls of a model's blocks in a few microbatches, from which the tables of a script are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from unipar.backend import Part
from unipar.errors import TaskError, UniparError
from unipar_mesh.tensor.sites import BLOCK, frames_to, line_of

BlockCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one call of a block."""


@dataclass(frozen=True)
class Draw:
    """Call of dropout or attention in a forward pass over the model."""

    block: str
    """Block in which it is, or "" between two blocks."""

    function: str
    line: str
    hidden: tuple[int, ...]
    """Shape of what the last block was given before."""

    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def drops(self) -> bool:
        """True for dropout that drops something."""
        given = self.arguments
        return self.function == "dropout" and bool(given.get("training", True)) and given.get("p", 0.5) > 0


@dataclass(frozen=True)
class ModelLook:
    """Blocks of a model in the order in which the loss calls them, and what each is given."""

    part: Part
    order: tuple[str, ...]
    calls: tuple[Mapping[str, BlockCall], ...]
    """Arguments by block, in each of the microbatches."""

    draws: tuple[Draw, ...]
    passed: tuple[str, ...]
    """Blocks that are given what a block before has put out, in addition to the hidden states."""

    detours: tuple[str, ...]
    """Blocks whose hidden states are not what the block before has put out."""

    tuples: bool
    """True if the last block puts out a tuple, whose first item are the hidden states."""


def look_at_calls(part: Part, batches: list[Any]) -> ModelLook:
    """Run the loss on each microbatch, as in training; calls tell which arguments take gradients."""
    assert part.loss is not None
    model, order = part.module, list[str]()
    calls = list[dict[str, BlockCall]]()
    watch = _Watch()
    handles: list[Any] = []

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if len(calls) == 1:
                order.append(name)
            calls[-1].setdefault(name, tree_map(_detached, (args, kwargs)))
            watch.block = name
            floats = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
            watch.hidden = tuple(floats[0].shape) if floats else ()
            others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not (*floats, None)[0]]
            if any(x is other for x in others for other in watch.out):
                watch.passed.append(name)
            if watch.last and (not floats or floats[0] is not watch.last[0]):
                watch.detours.append(name)

        return hook

    def behind(module: nn.Module, args: Any, out: Any) -> None:
        watch.block = None if module is last else ""
        watch.tuples = isinstance(out, tuple)
        watch.last = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        watch.out += watch.last

    last = model.get_submodule(part.blocks[-1])
    for name in part.blocks:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(behind))
    try:
        with torch.random.fork_rng([]), torch.enable_grad(), watch:
            for batch in batches:
                watch.block, watch.out, watch.last = None, [], []
                calls.append({})
                part.loss(model, batch)
    except UniparError:
        raise
    except Exception as e:
        text = (str(e).splitlines() or [""])[0]
        raise TaskError(f"loss() raised {type(e).__name__}: {text}; export runs it to see how blocks are called") from e
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in part.blocks if name not in calls[0]]
    if missing:
        raise TaskError(f"parallel: the loss does not call {missing[0]}, one of the model's blocks")
    seen = tuple(watch.draws), tuple(watch.passed), tuple(watch.detours)
    return ModelLook(part, tuple(order), tuple(calls), *seen, watch.tuples)


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


class _Watch(TorchFunctionMode):
    """Mode that notes calls of dropout and attention from the first block on."""

    def __init__(self) -> None:
        super().__init__()
        self.block: str | None = None
        self.hidden: tuple[int, ...] = ()
        self.tuples = False
        self.out: list[Tensor] = []
        self.last: list[Tensor] = []
        self.passed: list[str] = []
        self.detours: list[str] = []
        self.draws: list[Draw] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.block is not None and func in (F.dropout, F.scaled_dot_product_attention, torch.dropout):
            names = _ARGUMENTS[func]
            given = dict(zip(names, args, strict=False)) | kwargs
            facts = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in given.items()}
            first = given[names[0]]
            facts["contiguous"] = first.is_contiguous()
            self.draws.append(Draw(self.block, func.__name__, line_of(frames_to(BLOCK)), self.hidden, facts))
        return func(*args, **kwargs)


_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "training"),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
