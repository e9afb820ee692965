"""Base learning rates of parameter groups, and the schedule's factor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from unipar.backend import Factor
from unipar.config.sections.schedule import Constant, Schedule
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.errors import ConfigError, TaskError


class BaseRates:
    """Base learning rate of each parameter group; `set` multiplies all of them by one factor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.base: list[float] = [float(g["lr"]) for g in optimizer.param_groups]
        for group in optimizer.param_groups:
            _set_rate(group, 0.0)  # some libraries call the optimizer while they wrap it: weights must not change

    def set(self, optimizer: Any, factor: Factor) -> None:
        """Set each group's learning rate to its base rate times `factor`."""
        for group, base in zip(optimizer.param_groups, self.base, strict=True):
            if type(group["lr"]) is float:
                group["lr"] = base * factor
            else:
                _set_rate(group, base * factor)

    def put_on(self, device: torch.device, optimizer: Any) -> None:
        """Keep each group's rate on the device, in the fp32 that kernels read, so that `set` takes a factor there."""
        for group in optimizer.param_groups:
            group["lr"] = torch.full((), float(group["lr"]), device=device)


def _set_rate(group: dict[str, Any], rate: Factor) -> None:
    """Set a group's rate; one that is a tensor stays that tensor, which an update that is compiled reads."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def current_rates(optimizer: Any) -> list[float]:
    """Return the current learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


@final
class DeviceFactors:
    """Factors of the learning rate from one step on; the device chooses one by the number of updates it skipped."""

    def __init__(self, factors: Sequence[float], first: int, device: torch.device) -> None:
        self._table: Tensor = to_device(torch.tensor(factors, dtype=torch.float64), device)
        self._first = first

    def at(self, step: int, skipped: Tensor) -> Tensor:
        """Return the factor at optimizer step `step`, less the number of skipped updates."""
        return self._table.take(step - self._first - skipped)


OwnSchedule = Callable[[int, int], float]
"""Schedule of a task: `Task.schedule(step, steps)`."""


@final
class RateSchedule:
    """Learning rate's factor at each optimizer step: that of the config, or of the task's own schedule."""

    def __init__(self, schedule: Schedule, own: OwnSchedule | None = None) -> None:
        if own is not None and schedule != Constant():
            raise TaskError(
                f"train.schedule (name: {schedule.name}, warmup: {schedule.warmup}) has no effect, as the task has a "
                "schedule() of its own: leave one of them out"
            )
        self._schedule, self._own = schedule, own
        self._curve: Callable[[int], float] = schedule.curve(1)
        self._steps: int | None = None
        """Number of steps of the run for which `_curve` was made."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate at optimizer step `step` (from 0) of `steps`."""
        if steps != self._steps:
            own = self._own
            self._curve = self._schedule.curve(steps) if own is None else lambda step: _checked(own, step, steps)
            self._steps = steps
        return self._curve(step)

    def check(self, steps: int, world: World) -> None:
        """Raise an error if the schedule does not fit into the steps, or if ranks have other rates than rank 0."""
        if (misfit := self._schedule.misfit(steps)) is not None:
            raise ConfigError(f"train.{misfit}")
        if self._own is None:
            return
        looked_at = sorted({0, steps - 1, *range(0, steps, max(1, steps // 32))})
        mine = json.dumps([self.factor(step, steps) for step in looked_at])

        def sentence(first: str) -> str:
            theirs: list[float] = json.loads(first)
            step = next(i for i, (a, b) in enumerate(zip(theirs, json.loads(mine), strict=True)) if a != b)
            return (
                f"schedule({looked_at[step]}, {steps}) returned {json.loads(mine)[step]:g} on rank {world.rank} and "
                f"{theirs[step]:g} on rank 0: it must depend on step and steps alone"
            )

        world.agree("schedule", mine, sentence)


def _checked(own: OwnSchedule, step: int, steps: int) -> float:
    value: Any = own(step, steps)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise TaskError(
            f"schedule({step}, {steps}) returned {value!r}; return the factor of the learning rate, a number that is "
            "not negative: 1.0 is train.optimizer.lr"
        )
    return float(value)
