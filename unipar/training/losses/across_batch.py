"""Loss across the batch: features of all samples without gradients first, then each microbatch with the loss's own.

The features of all ranks are gathered, so that every rank computes the same loss and its gradients by feature. Each
microbatch then computes its features again, and its backward begins with these gradients: the result is that of one
forward and backward over the whole global batch, while activations of one microbatch are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from unipar.backend import Engine, LossFn, Mark, Micro
from unipar.config import Config
from unipar.data.order import MicrobatchPlan
from unipar.distributed.device import has_own_memory
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar.profiling.observer import StepObserver
from unipar.task import Task
from unipar.task.features import FeatureColumns, check_across_loss, widen_features
from unipar.training.losses.sample_rows import SampleRows
from unipar.utils.seeding import seed_torch

_LIMIT_OF_DIFFERENCE = 0.05
"""Relative difference from which features that are computed again count as others; kernels may round differently."""


@final
@dataclass(frozen=True)
class _MicroGradients:
    """Loss and gradients with which a microbatch's backward begins."""

    loss: Tensor
    """Loss of the whole global batch."""

    columns: Sequence[Tensor | None]
    """Gradient of each column of features, divided by the microbatch's scale; None for one that has none, and of a
    microbatch that does not count."""

    first: Sequence[Tensor] | None
    """Features of the first pass, if they are to be compared with those of the second."""


@final
@dataclass(frozen=True)
class WholeLoss:
    """Loss of a whole global batch, and its gradients by feature."""

    loss: Tensor
    gradients: Sequence[Tensor | None]
    """Gradient of each column, of all samples; None for a column that has none."""

    own: Sequence[slice]
    """Samples of each of this rank's microbatches."""

    @classmethod
    def of(
        cls,
        world: World,
        loss_across: Callable[[Any], Any],
        features: Sequence[FeatureColumns],
        rows: Sequence[int],
        of_ranks: Sequence[Sequence[int]],
        seed: int,
    ) -> Self:
        """Return the loss of all ranks' features; `rows` are those that count of each of this rank's microbatches.

        `of_ranks`: rows of each rank, by microbatch; () if they are not known.
        """
        batch = SampleRows(world, rows, of_ranks)
        counting = [
            [column[:n] for column, n in zip(of, rows, strict=True)]
            for of in zip(*(f.columns for f in features), strict=True)
        ]
        with torch.enable_grad():
            leaves = [widen_features(batch.gather(torch.cat(columns).detach())) for columns in counting]
            leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
            seed_torch(seed, device=has_own_memory(world.device))
            loss = check_across_loss(loss_across(features[0].nest(leaves)))
            if not loss.requires_grad:
                raise TaskError(
                    "loss_across() returned a loss that does not depend on the features: compute it from them, without "
                    "detach() or torch.no_grad()"
                )
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            gradients = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        return cls(loss.detach(), [next(gradients) if leaf.requires_grad else None for leaf in leaves], batch.own)

    def of_micro(self, at: slice, scale: float) -> list[Tensor | None]:
        """Return a microbatch's own rows of each gradient, divided by its scale, with which engines multiply."""
        return [None if g is None or not scale else g[at] / scale for g in self.gradients]


@final
class AcrossBatch:
    """Loss across the batch of one run, on one rank."""

    def __init__(self, task: Task, world: World, config: Config) -> None:
        """Raise TaskError if the task or the config has what does not go with such a loss."""
        lacking = [name for name in ("features", "loss_across") if not task.defines(name)]
        if lacking:
            raise TaskError(
                f"the task has no {lacking[0]}(): a loss across the batch needs features(model, batch) and "
                "loss_across(features)"
            )
        if task.defines("weight"):
            raise TaskError(
                "the task has weight(batch) and loss_across(features): a loss of the full batch at once is not a mean "
                "over microbatches; weigh samples in loss_across, by a column of features, and leave weight out"
            )
        if config.train.local_steps is not None:
            raise TaskError(
                f"train.local_steps: {config.train.local_steps} lets every rank take steps by itself, and "
                "loss_across() compares the samples of all ranks in every step: leave local_steps out"
            )
        self._task, self._world = task, world
        self._micros: dict[int, _MicroGradients] = {}
        self._compared = False

    def begin(
        self,
        engine: Engine,
        features: LossFn,
        micros: Sequence[Micro],
        plans: Sequence[MicrobatchPlan],
        seed: int,
        mark: Mark,
        work: StepObserver,
    ) -> None:
        """Compute the features of this rank's microbatches, the loss of all ranks' samples, and its gradients.

        `seed`: for random numbers that the loss draws, which are the same on every rank.
        """
        mark("forward")
        feature_columns: list[FeatureColumns] = []
        rows: list[int] = []
        with work.counting_again() as watched:
            counted = watched(features)
            for micro, plan in zip(micros, plans, strict=True):
                returned = engine.forward_only(micro.bind(counted), micro.batch)
                feature_columns.append(FeatureColumns.of(returned, len(plan.keys)))
                rows.append(len(plan.keys) if micro.scale else 0)
        self._require_one_nesting(feature_columns)
        known = all(len(plan.of_ranks) == self._world.data_size for plan in plans)
        of_ranks = [plan.of_ranks for plan in plans] if known else ()
        batch_loss = WholeLoss.of(self._world, self._task.loss_across, feature_columns, rows, of_ranks, seed)
        self._micros = {
            micro.number: _MicroGradients(
                batch_loss.loss,
                batch_loss.of_micro(at, micro.scale),
                None if self._compared or not micro.scale else columns.columns,
            )
            for micro, columns, at in zip(micros, feature_columns, batch_loss.own, strict=True)
        }

    def end(self) -> None:
        """Let the gradients go, after the step's last backward."""
        self._micros, self._compared = {}, True

    def loss(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        """Return the loss of the whole global batch; its backward is that of this microbatch's features alone."""
        known = self._micros[number]
        columns = FeatureColumns.of(self._task.features(model, batch)).columns
        if known.first is not None:
            require_equal(columns, known.first, number)
        return BeginBackward.apply(known.loss, known.columns, *columns)  # pyright: ignore[reportReturnType, reportUnknownMemberType, reportUnknownVariableType] - untyped in torch

    def _require_one_nesting(self, features: Sequence[FeatureColumns]) -> None:
        """Raise TaskError if microbatches have features of other kinds: they would be added to one another."""
        shown = [_kinds(columns) for columns in features]
        for other in shown[1:]:
            if other != shown[0]:
                raise TaskError(
                    f"features() returned {other} for one microbatch and {shown[0]} for another: {_ONE_KIND}"
                )
        rank = self._world.rank
        if not self._compared:
            self._world.agree(
                "features",
                shown[0],
                lambda first: f"features() returned {shown[0]} on rank {rank} and {first} on rank 0: {_ONE_KIND}",
            )


_ONE_KIND = "return the same tensors for every batch, of rows of one shape, or give each sample a column's padding"


@final
class BeginBackward(torch.autograd.Function):
    """Loss of the whole batch, whose backward gives features the gradients that are known already."""

    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *columns: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gradients, ctx.like = gradients, [(column.shape, column.dtype) for column in columns]
        return loss.clone()

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, factor: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        known = zip(ctx.gradients, ctx.like, ctx.needs_input_grad[2:], strict=True)
        return (
            None,
            None,
            *(_scaled(g, shape, dtype, factor) if needed else None for g, (shape, dtype), needed in known),
        )


def _scaled(gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype, factor: Tensor) -> Tensor:
    """Return a column's gradient times a factor; zeros if there is none."""
    return factor.new_zeros(shape, dtype=dtype) if gradient is None else (gradient * factor).to(dtype)


def _kinds(columns: FeatureColumns) -> str:
    """Return dtype and shape of a row of each column of features."""
    return ", ".join(f"{str(c.dtype).removeprefix('torch.')} {list(c.shape[1:])}" for c in columns.columns)


def require_equal(columns: Sequence[Tensor], first: Sequence[Tensor], number: int, call: str = "features()") -> None:
    """Raise TaskError if features that are computed again are others: their gradients would not be theirs."""
    for i, (now, before) in enumerate(zip(columns, first, strict=True)):
        size = widen_features(before).double().norm().item()
        same_shape = now.shape == before.shape
        distance = (widen_features(now.detach()) - widen_features(before)).double().norm().item() if same_shape else inf
        if distance > _LIMIT_OF_DIFFERENCE * max(size, 1e-30):
            raise TaskError(
                f"{call} gave other values when microbatch {number} was computed again, with gradients (tensor "
                f"{i} of them): it must be the same in both calls; draw random numbers from PyTorch's generators only, "
                "and let nothing of the first call change the second"
            )
