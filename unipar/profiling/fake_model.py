"""`FakeModel`: a copy of a model without values, on which the operations of a step are counted."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from unipar.backend import Fn, Micro
from unipar.profiling.flops import CollectiveCalled, FlopCounter


@final
class FakeModel:
    """Copy of a model, made before blocks are compiled, recomputed or split; it takes no memory."""

    def __init__(self, module: nn.Module) -> None:
        """Copy `module`, whose tensors may be on the meta device; raise whatever its own code raises when copied."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(self._mode):
            self.module = copy.deepcopy(module)
        with self._mode, torch.no_grad():
            for owner in self.module.modules():
                tensors: dict[str, Any] = vars(owner)
                _move(tensors["_parameters"])
                _move(tensors["_buffers"])

    def count(self, loss: Fn, micros: Sequence[Micro]) -> FlopCounter:
        """Return a counter that has counted these microbatches; raise whatever the loss raises without values.

        Microbatches of equal shapes are computed once.
        """
        loss = loss_of_a_copy(loss)
        total = FlopCounter()
        by_shapes: dict[Any, FlopCounter] = {}
        for micro in micros:
            shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in tree_leaves(micro.batch))
            if (one := by_shapes.get(shapes)) is None:
                one = by_shapes[shapes] = self._count_one(loss, micro.batch)
            total.flops += one.flops
            total.recomputed += one.recomputed
            total.unknown |= one.unknown
            total.uncounted |= one.uncounted
        return total

    def _count_one(self, loss: Fn, batch: Any) -> FlopCounter:
        counter = FlopCounter(alone=True)
        with self._mode, torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"):
            fake = tree_map(_without_values, batch)
            with counter:
                value = counter.watched(lambda model, batch, _: loss(model, batch))(self.module, fake, 0)
                value.backward()
        for p in self.module.parameters():
            p.grad = None
        return counter


def loss_of_a_copy(loss: Fn) -> Fn:
    """Return the loss as a method of a copy of its task, with lists and the like of its own.

    What the loss stores in its task is then not seen by the training.
    """
    task = getattr(loss, "__self__", None)
    if task is None:
        return loss
    task_copy = copy.copy(task)
    for name, value in vars(task_copy).items():
        if type(value) in (list, dict, set, deque):
            vars(task_copy)[name] = copy.copy(value)
    return getattr(type(task), loss.__name__).__get__(task_copy)


def explain_uncounted(error: Exception) -> str:
    """Return why a step could not be counted without values, from the error."""
    if isinstance(error, CollectiveCalled):
        return f"loss() calls a collective ({error})"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"the model does not run without values ({type(error).__name__}: {first[:160]})"


def _without_values(x: Any) -> Any:
    return _empty_like(x) if isinstance(x, Tensor) else x


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _move(tensors: dict[str, Any]) -> None:
    """Put tensors that are elsewhere onto the CPU: the device makes no difference to what is counted."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.device.type != "cpu":
            moved = _empty_like(x)
            tensors[name] = nn.Parameter(moved, x.requires_grad) if isinstance(x, nn.Parameter) else moved
