"""Loss of the step that a part takes now: seeded by step and microbatch, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from unipar.backend import Engine, Factor, Fn, LossFn, Mark, Micro, Step
from unipar.config import Config
from unipar.data.order import MicrobatchPlan
from unipar.distributed.device import has_own_memory
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar.profiling.observer import StepObserver
from unipar.task import Task
from unipar.task.task import LOSS_ACROSS
from unipar.training.losses.across_batch import AcrossBatch
from unipar.training.losses.through_parts import NumberedLoss
from unipar.utils.seeding import MIX_START, mix_into, seed_torch

_OF_WHOLE_BATCH = 1 << 32
"""Number for the random numbers of what is computed once for the whole batch: no microbatch has it."""


@final
class StepLoss:
    """Loss in one step of one rank, as an engine calls it for each microbatch."""

    def __init__(self, task: Task, world: World, config: Config, mark: Mark, work: StepObserver) -> None:
        declared = any(task.defines(name) for name in LOSS_ACROSS)
        self._across = AcrossBatch(task, world, config) if declared else None
        self.is_across = declared
        """Whether the task's loss is one across the batch."""

        self._task, self._mark, self._work = task, mark, work
        self._seeds_device = has_own_memory(world.device)
        self._seed_generators = seed_torch if self._seeds_device else torch.default_generator.manual_seed
        self._seed = mix_into(MIX_START, config.train.seed, 3)
        self._shares = world.data_size
        self._own = (task.loss,)
        self._fns: Sequence[Fn] = self._own
        """Losses of the step that is taken now."""

        self._count = 0
        """Number of microbatches of all ranks, by which the numbers of the second loss's are larger; 0: one loss."""

        self._numbered: LossFn | None = None
        """Loss that takes a microbatch's number, in place of `_fns`."""

        self._done, self._of_part = 0, tuple[int, ...]()

    def begin(self, done: int, of_part: tuple[int, ...]) -> None:
        """Begin a step with the task's own loss, when `done` steps are done.

        `of_part`: numbers that make random numbers differ between parts.
        """
        self._done, self._of_part, self._fns, self._count, self._numbered = done, of_part, self._own, 0, None

    def take_step(
        self,
        engine: Engine,
        loss: Fn | Sequence[Fn] | NumberedLoss | None,
        micros: Sequence[Micro],
        plans: Sequence[MicrobatchPlan],
        rate: Factor,
    ) -> Step:
        """Return the result of the engine's step with this loss, or these; None: the task's own."""
        across, each = None, micros
        if loss is not None:
            each = self._use(loss, micros)
        elif (across := self._across) is not None:
            self._numbered = across.loss
            across.begin(engine, self._features, micros, plans, self._seed_of(_OF_WHOLE_BATCH), self._mark, self._work)
        if self._work.observes:
            plain = self._fns[0] if len(self._fns) == 1 else partial(_sum, self._fns)
            out = self._work.run_step(engine, self.compute, each, rate, self._mark, (plain, micros))
        else:
            out = engine.step(self.compute, each, rate, self._mark)
        if across is not None:
            across.end()
        return out

    def _use(self, loss: Fn | Sequence[Fn] | NumberedLoss, micros: Sequence[Micro]) -> Sequence[Micro]:
        """Use another loss than the task's, or several; return the microbatches of the first, then of the second."""
        if isinstance(loss, NumberedLoss):
            self._numbered = loss.fn
            return micros
        self._fns = _listed(loss)
        if len(self._fns) == 1:
            return micros
        self._count = len(micros) * self._shares
        numbered = ((k, micro) for k in range(len(self._fns)) for micro in micros)
        return [replace(micro, number=micro.number + k * self._count) for k, micro in numbered]

    def compute(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        """Return the loss, with PyTorch seeded by step and microbatch, so that the rank makes no difference."""
        which = 0
        if self._count:
            which, number = divmod(number, self._count)
        seed = mix_into(self._seed, self._done, number)
        if which or self._of_part:
            seed = mix_into(seed, *([which] if which else []), *self._of_part)
        self._seed_generators(seed >> 1)
        if self._numbered is not None:
            return self._numbered(model, batch, number)
        loss: Any = self._fns[which](model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TaskError(f"loss() returned {shown}; return the mean over the batch as a scalar tensor")
        return loss

    def _features(self, model: nn.Module, batch: Any, number: int) -> Any:
        """Return the features of a microbatch, with the random numbers that they are computed with again."""
        seed_torch(self._seed_of(number), device=self._seeds_device)
        return self._task.features(model, batch)

    def seeded(self, fn: LossFn, *, done: int, of_part: tuple[int, ...]) -> LossFn:
        """Return a function that draws the random numbers which this part's step draws for each microbatch."""

        def run(model: nn.Module, batch: Any, number: int) -> Any:
            self._done, self._of_part = done, of_part
            seed_torch(self._seed_of(number), device=self._seeds_device)
            return fn(model, batch, number)

        return run

    def _seed_of(self, *numbers: int) -> int:
        return mix_into(self._seed, self._done, *numbers, *self._of_part) >> 1


def _listed(losses: Fn | Sequence[Fn]) -> Sequence[Fn]:
    """Return one or several losses as a list; raise TaskError if there is none."""
    if callable(losses):
        return (losses,)
    if not losses or not all(callable(loss) for loss in losses):
        raise TaskError(f"run.step(loss=...) takes a function, or a list of functions; it got {losses!r}")
    return tuple(losses)


def _sum(losses: Sequence[Fn], model: nn.Module, batch: Any) -> Any:
    """Return the sum of several losses, as if they were one."""
    return sum(loss(model, batch) for loss in losses)
