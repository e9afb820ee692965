"""Base learning rates of parameter groups, and the schedule's factor."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from unipar.config.sections.optimizer import Constant, Schedule


class BaseRates:
    """Base learning rate of each parameter group; `set` multiplies all of them by one factor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.base: list[float] = [g["lr"] for g in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # some libraries call the optimizer while they wrap it: weights must not change

    def set(self, optimizer: Any, factor: float) -> None:
        """Set each group's learning rate to its base rate times `factor`."""
        for group, base in zip(optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor


def current_rates(optimizer: Any) -> list[float]:
    """Return the current learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def schedule_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor of the learning rate at optimizer step `step` (from 0) of `steps`."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if isinstance(schedule, Constant):
        return 1.0
    progress = (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup)
    decay = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.end + (1.0 - schedule.end) * max(0.0, decay)
