"""Loss of the step that a part takes now: seeded by step and microbatch, and checked."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from unipar.backend import Engine, Fn, LossFn, Mark, Micro
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
        self._task, self._mark, self._work = task, mark, work
        self._device = has_own_memory(world.device)
        self._seed = mix_into(MIX_START, config.train.seed, 3)
        self._shares = world.shares
        self._fns: Sequence[Fn] = (task.loss,)
        self._count = 1
        """Number of microbatches of all ranks, by which the numbers of the second loss's are larger."""

        self._done, self._of_part = 0, tuple[int, ...]()
        self._is_across = False
        self._numbered: NumberedLoss | None = None

    @contextmanager
    def step(
        self,
        engine: Engine,
        loss: Fn | Sequence[Fn] | NumberedLoss | None,
        micros: Sequence[Micro],
        plans: Sequence[MicrobatchPlan],
        *,
        done: int,
        of_part: tuple[int, ...],
    ) -> Generator[tuple[Fn, Sequence[Micro]]]:
        """Context manager: this is the loss of a part's step, given or the task's own.

        It yields the loss as a function, and the microbatches: with several losses those of the first, then those of
        the second. `done`: steps that are done; `of_part`: numbers that make random numbers differ between parts.
        """
        self._numbered = loss if isinstance(loss, NumberedLoss) else None
        loss = None if isinstance(loss, NumberedLoss) else loss
        self._fns = _listed(self._task.loss if loss is None else loss)
        self._done, self._of_part, self._count = done, of_part, len(micros) * self._shares
        across = self._across if loss is None and self._numbered is None else None
        self._is_across = across is not None
        if across is not None:
            across.begin(engine, self._features, micros, plans, self._seed_of(_OF_WHOLE_BATCH), self._mark, self._work)
        if len(self._fns) == 1:
            yield self._fns[0], micros
        else:
            numbered = ((k, micro) for k in range(len(self._fns)) for micro in micros)
            yield partial(_sum, self._fns), [replace(m, number=m.number + k * self._count) for k, m in numbered]
        if across is not None:
            across.end()

    def __call__(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        """Return the loss, with PyTorch seeded by step and microbatch, so that the rank makes no difference."""
        which, micro = divmod(number, self._count)
        seed_torch(self._seed_of(micro, *((which,) if which else ())), device=self._device)
        if self._numbered is not None:
            return self._numbered.fn(model, batch, number)
        if self._is_across and self._across is not None:
            return self._across.loss(model, batch, number)
        loss: Any = self._fns[which](model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TaskError(f"loss() returned {shown}; return the mean over the batch as a scalar tensor")
        return loss

    def _features(self, model: nn.Module, batch: Any, number: int) -> Any:
        """Return the features of a microbatch, with the random numbers that they are computed with again."""
        seed_torch(self._seed_of(number), device=self._device)
        return self._task.features(model, batch)

    def seeded(self, fn: LossFn, *, done: int, of_part: tuple[int, ...]) -> LossFn:
        """Return a function that draws the random numbers which this part's step draws for each microbatch."""

        def run(model: nn.Module, batch: Any, number: int) -> Any:
            self._done, self._of_part = done, of_part
            seed_torch(self._seed_of(number), device=self._device)
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
