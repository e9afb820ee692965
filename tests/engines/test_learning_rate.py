"""A task's own schedule: what it may return, that ranks agree on it, and that the config names no other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from unipar.config.sections.schedule import Constant, Cosine, WarmupStableDecay
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.learning_rate import RateSchedule
from unipar.errors import ConfigError, TaskError

STORE = HashStore()


def world(rank: int) -> World:
    STORE.set_timeout(timedelta(seconds=5))
    place = Place(rank=rank, size=2, local_rank=rank, local_size=2, launcher="unipar")
    made = World(place, torch.device("cpu"), STORE)
    made.close_without_peers()  # it is not the world of this process, which later tests would leave
    return made


@pytest.mark.parametrize(
    ("value", "shown"), [(-0.5, "-0.5"), (float("nan"), "nan"), ("1", "'1'"), (None, "None"), (True, "True")]
)
def test_a_factor_that_is_none(value: Any, shown: str) -> None:
    """The sentence has the step, the value and the meaning of 1."""
    with pytest.raises(TaskError) as e:
        RateSchedule(Constant(), lambda step, steps: value).factor(3, 20)
    assert str(e.value) == (
        f"schedule(3, 20) returned {shown}; return the factor of the learning rate, a number that is not negative: "
        "1.0 is train.optimizer.lr"
    )


def test_two_schedules() -> None:
    """One of the task and one of the config exclude each other."""
    with pytest.raises(TaskError) as e:
        RateSchedule(Cosine(warmup=2), lambda step, steps: 1.0)
    assert str(e.value) == (
        "train.schedule (name: cosine, warmup: 2) has no effect, as the task has a schedule() of its own: leave one of "
        "them out"
    )


def test_ranks_with_other_rates() -> None:
    """A schedule that depends on the rank is refused before the first step, with the first step that differs."""
    RateSchedule(Constant(), lambda step, steps: 1.0).check(20, world(0))
    with pytest.raises(TaskError) as e:
        RateSchedule(Constant(), lambda step, steps: 1.0 - 0.5 * (step >= 7)).check(20, world(1))
    assert str(e.value) == (
        "schedule(7, 20) returned 0.5 on rank 1 and 1 on rank 0: it must depend on step and steps alone"
    )


def test_a_schedule_longer_than_the_epochs() -> None:
    """Where the config counts epochs, the steps are known when the data is."""
    with pytest.raises(ConfigError) as e:
        RateSchedule(WarmupStableDecay(warmup=8, decay=9)).check(16, world(0))
    assert str(e.value) == (
        "train.schedule.warmup (8) and schedule.decay (9) are more than steps (16) together; give fewer steps of each, "
        "or more steps"
    )
