"""Calls of a model's blocks in a few microbatches, from which the tables of a script are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

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
        arguments = self.arguments
        return self.function == "dropout" and bool(arguments.get("training", True)) and arguments.get("p", 0.5) > 0


@final
class ModelLook(TorchFunctionMode):
    """Blocks of a model in the order in which the loss calls them, and what each is given."""

    def __init__(self, part: Part, rows: tuple[str, ...] = ()) -> None:
        """`rows`: modules whose parameters nothing else should use."""
        super().__init__()
        self.part = part
        self.order: list[str] = []
        self.calls: list[dict[str, BlockCall]] = []
        """Arguments by block, in each of the microbatches."""

        self.draws: list[Draw] = []
        self.passed: list[str] = []
        """Blocks that are given what a block before has put out, in addition to the hidden states."""

        self.detours: list[str] = []
        """Blocks whose hidden states are not what the block before has put out."""

        self.uses: list[tuple[str, str, str]] = []
        """Uses of the parameters of `rows` outside of these: name of the parameter, function and line."""

        self._rows = {id(p): f"{n}.{k}" for n in rows for k, p in part.module.get_submodule(n).named_parameters()}
        self._hooked = [part.module.get_submodule(name) for name in rows]
        self._inside_rows = False
        self._block: str | None = None
        self._hidden: tuple[int, ...] = ()
        self._out: list[Tensor] = []
        self._last: list[Tensor] = []

    def run(self, batches: list[Any]) -> None:
        """Run the loss on each microbatch, as in training: calls tell which arguments take gradients."""
        model, names, loss = self.part.module, self.part.blocks, self.part.loss
        assert loss is not None
        handles: list[Any] = []
        for name in names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._behind, None if name == names[-1] else "")))
        for module in self._hooked:
            handles.append(module.register_forward_pre_hook(partial(self._in_rows, True)))
            handles.append(module.register_forward_hook(partial(self._in_rows, False)))
        try:
            with torch.random.fork_rng([]), torch.enable_grad(), self:
                for batch in batches:
                    self._block, self._out, self._last = None, [], []
                    self.calls.append({})
                    loss(model, batch)
        except UniparError:
            raise
        except Exception as e:
            text = (str(e).splitlines() or [""])[0]
            raise TaskError(
                f"loss() raised {type(e).__name__}: {text}; export runs it to see how blocks are called"
            ) from e
        finally:
            for handle in handles:
                handle.remove()
        for name in names:
            if name not in self.calls[0]:
                raise TaskError(f"parallel: the loss does not call {name}, one of the model's blocks")

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if len(self.calls) == 1:
            self.order.append(name)
        self.calls[-1].setdefault(name, tree_map(_detached, (args, kwargs)))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        hidden = next((x for x in tensors if x.is_floating_point()), None)
        self._block, self._hidden = name, () if hidden is None else tuple(hidden.shape)
        if any(x is other for x in tensors if x is not hidden for other in self._out):
            self.passed.append(name)
        if self._last and hidden is not self._last[0]:
            self.detours.append(name)

    def _in_rows(self, inside: bool, *_: Any) -> None:
        self._inside_rows = inside

    def _behind(self, block: str | None, module: nn.Module, args: Any, out: Any) -> None:
        self._block = block
        self._last = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._out += self._last

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._block is not None and func in _ARGUMENTS:
            names = _ARGUMENTS[func]
            arguments = dict(zip(names, args, strict=False)) | kwargs
            facts = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in arguments.items()}
            facts["contiguous"] = arguments[names[0]].is_contiguous()
            self.draws.append(Draw(self._block, func.__name__, line_of(frames_to(BLOCK)), self._hidden, facts))
        if self._rows and not self._inside_rows:
            name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
            for parameter in self._parameters_in(args, kwargs) if name not in _PLAIN_FACTS else ():
                self.uses.append((parameter, name, line_of(frames_to(BLOCK))))
        return func(*args, **kwargs)

    def _parameters_in(self, args: Any, kwargs: Any) -> Iterator[str]:
        return (self._rows[id(x)] for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) in self._rows)


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


_PLAIN_FACTS = ("dtype", "device", "requires_grad")
"""Attributes of a parameter that are the same for a part of it."""

_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "training"),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
