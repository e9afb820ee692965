"""One loss through several trained parts: outputs first, then a step of each part with the loss's gradients.

Each part keeps its engine, which runs one forward and backward at a time. So the outputs of all parts but the last are
computed without gradients, the last part's step gives the loss and its gradients by output, and each other part then
computes its output again, and its backward begins with these. All gradients are of the weights before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from typing_extensions import override

from unipar.backend import Engine, LossFn, Micro
from unipar.errors import TaskError
from unipar.training.losses.across_batch import BeginBackward, require_equal

OutputFn = Callable[[nn.Module, Any, Mapping[str, Any]], Any]
"""Function of a part's model, a microbatch, and the outputs of the parts before it."""


@final
class NumberedLoss:
    """Loss that is told a microbatch's number, beside model and batch."""

    def __init__(self, fn: LossFn) -> None:
        self.fn = fn


@final
class OutputsOfParts:
    """Outputs of some parts for this rank's microbatches, and the gradients that a loss has by them."""

    def __init__(self, micros: Sequence[Micro]) -> None:
        self._micros = micros
        self._outputs: dict[int, dict[str, Any]] = {micro.number: {} for micro in micros}
        self._gradients: dict[tuple[int, str], list[Tensor | None]] = {}
        self._factors: dict[int, Tensor] = {}
        """By which each microbatch's loss was multiplied in the last step: its scale, the engine's, the precision's."""

    def compute(self, part: str, engine: Engine, fn: OutputFn, seeded: Callable[[LossFn], LossFn]) -> None:
        """Compute a part's outputs without gradients, before any part takes its step."""
        run = seeded(lambda model, batch, number: fn(model, batch, self._outputs[number]))
        for micro in self._micros:
            output = tree_map(_as_leaf, engine.forward_only(micro.bind(run), micro.batch))
            _tensors(output)
            self._outputs[micro.number][part] = output

    def last(self, loss: OutputFn) -> NumberedLoss:
        """Return the loss of the part that takes its step first, which has the outputs of all others."""

        def run(model: nn.Module, batch: Any, number: int) -> Tensor:
            value = loss(model, batch, self._outputs[number])
            if not isinstance(value, Tensor) or value.ndim:  # pyright: ignore[reportUnnecessaryIsInstance] - the user's code
                shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise TaskError(f"loss() returned {shown}; return the mean over the batch as a scalar tensor")
            return self._observed(value, number)

        return NumberedLoss(run)

    def again(self, part: str, fn: OutputFn) -> NumberedLoss:
        """Return the loss of another part's step, after that of the parts behind it: zero, with the known gradients."""
        self._collect()

        def run(model: nn.Module, batch: Any, number: int) -> Tensor:
            outputs = self._outputs[number]
            before = _tensors(outputs[part])
            columns = _tensors(fn(model, batch, outputs))
            require_equal(columns, [t.detach() for t in before], number, f"the function of part {part!r}")
            gradients = self._gradients.get((number, part)) or [None] * len(columns)
            zero = columns[0].new_zeros((), dtype=torch.float32)
            return self._observed(BeginBackward.apply(zero, gradients, *columns), number)  # pyright: ignore[reportArgumentType] - untyped in torch

        return NumberedLoss(run)

    def _observed(self, loss: Tensor, number: int) -> Tensor:
        return _ObserveFactor.apply(loss, self._factors, number)  # pyright: ignore[reportReturnType] - untyped in torch

    def _collect(self) -> None:
        """Add the gradients that the last step left at the outputs, of the loss as the task has computed it."""
        for micro in self._micros:
            factor = self._factors.pop(micro.number, None)
            for part, output in self._outputs[micro.number].items():
                leaves = _tensors(output)
                known = self._gradients.setdefault((micro.number, part), [None] * len(leaves))
                for i, leaf in enumerate(leaves):
                    if leaf.grad is None:
                        continue
                    if micro.scale and factor is not None:
                        gradient = leaf.grad / factor
                        before = known[i]
                        known[i] = gradient if before is None else before + gradient
                    leaf.grad = None


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output; raise TaskError if it has none."""
    tensors = [value for value in tree_flatten(output)[0] if isinstance(value, Tensor)]
    if not tensors:
        raise TaskError("run.step_through: a part's function returned no tensor; return what the loss needs of it")
    return tensors


@final
class _ObserveFactor(torch.autograd.Function):
    """Identity that notes by which factor its result is multiplied before its backward."""

    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, factors: dict[int, Tensor], number: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factors, ctx.number = factors, number
        return loss.clone()

    @staticmethod
    @override
    def backward(ctx: Any, factor: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factors[ctx.number] = factor.detach().clone()
        return factor, None, None
