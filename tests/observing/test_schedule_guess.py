"""A schedule is guessed from the rates that a script had, if it gives the same ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from unipar.observing.process.script_recipe import ScriptRecipe
from unipar.observing.process.script_state import ScriptState
from unipar.observing.schedule_guess import ScheduleGuess, guess_schedule
from unipar.results.observed_recipe import SeenSchedule


def _always(step: int) -> float:
    return 1.0


def _rise(step: int) -> float:
    return min(1.0, (step + 1) / 6)


_Make = Callable[[Optimizer], Any]


def _guess(make: _Make, seen: int, rate: float = 1e-3, of: int | None = None) -> ScheduleGuess | None:
    """Return the guess from the rates of the first steps under a schedule of torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    recipe = ScriptRecipe(ScriptState([]))
    schedule = make(optimizer)
    recipe.schedule_stepped(schedule)
    rates: dict[int, float] = {}
    for step in range(1, seen + 1):
        rates[step] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
    return guess_schedule(rates, rate, recipe.schedules, of or seen)


@pytest.mark.parametrize(
    ("make", "seen", "settings", "steps"),
    [
        (
            partial(lr_scheduler.CosineAnnealingLR, T_max=19, eta_min=1e-5),
            20,
            {"name": "cosine", "min_lr_ratio": 0.01},
            20,
        ),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=20), 10, {"name": "cosine", "timing": "transformers"}, 20),
        (partial(lr_scheduler.StepLR, step_size=4, gamma=0.5), 10, {"name": "step", "every": 4, "gamma": 0.5}, 10),
        (partial(lr_scheduler.ExponentialLR, gamma=0.9), 10, {"name": "step", "every": 1, "gamma": 0.9}, 10),
        (
            partial(lr_scheduler.MultiStepLR, milestones=[3, 7], gamma=0.1),
            10,
            {"name": "step", "milestones": [3, 7], "gamma": 0.1},
            10,
        ),
        (
            partial(lr_scheduler.PolynomialLR, total_iters=30, power=1.5),
            10,
            {"name": "polynomial", "power": 1.5, "timing": "transformers"},
            30,
        ),
        (partial(lr_scheduler.LambdaLR, lr_lambda=_always), 10, {"name": "constant"}, 10),
        (
            partial(lr_scheduler.LambdaLR, lr_lambda=_rise),
            10,
            {"name": "constant", "warmup": 6},
            10,
        ),
    ],
    ids=["annealing", "annealing-to-the-end", "step", "exponential", "milestones", "power", "constant", "warmup"],
)
def test_schedule_of_torch(make: _Make, seen: int, settings: dict[str, Any], steps: int) -> None:
    """The schedule of unipar that gives the same rates is found, with its length."""
    guess = _guess(make, seen)
    assert guess is not None
    assert (dict(guess.settings), guess.steps, guess.rate) == (settings, steps, 1e-3)


def test_schedules_of_transformers() -> None:
    """The names of its functions tell apart what begins with the same warm-up."""
    from transformers.optimization import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    expected = {"warmup": 12, "timing": "transformers"}
    for name, make in (("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)):
        guess = _guess(partial(make, num_warmup_steps=12, num_training_steps=80), 10)
        assert guess is not None
        assert (dict(guess.settings), guess.steps, guess.hinted) == ({"name": name, **expected}, 80, True)


def test_one_cycle() -> None:
    """The full rate of a one-cycle is not that of the optimizer."""
    guess = _guess(partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=20), 20)
    assert guess is not None
    assert guess.rate == 0.01
    assert guess.settings["name"] == "one-cycle"
    assert guess.settings["begin"] == pytest.approx(0.04)
    assert guess.settings["pct_start"] == pytest.approx(0.3)


def test_length_from_rates_alone() -> None:
    """The length of a line down to 0 that the script draws itself follows from the rates."""
    guess = guess_schedule({step: 1e-3 * (1 - (step - 1) / 99) for step in range(1, 11)}, 1e-3, [], 10)
    assert guess is not None
    assert (dict(guess.settings), guess.steps) == ({"name": "linear"}, 100)


def test_no_schedule() -> None:
    """Rates that no schedule of unipar gives have no guess."""
    assert guess_schedule({1: 1e-3, 2: 0.7e-3, 3: 0.9e-3, 4: 0.2e-3}, 1e-3, [], 4) is None


def test_schedule_by_epoch() -> None:
    """A schedule that the script steps once an epoch is one of steps, by the rates."""
    rates = {step: 0.1 * 0.7 ** ((step - 1) // 6) for step in range(1, 25)}
    guess = guess_schedule(rates, 0.1, [SeenSchedule(name="StepLR", numbers={"step_size": 1.0, "gamma": 0.7})], 24)
    assert guess is not None
    assert dict(guess.settings) == {"name": "step", "every": 6, "gamma": 0.7}


def test_only_the_warm_up() -> None:
    """If only a warm-up was seen, several schedules give its rates, and none is hinted at."""
    guess = guess_schedule({step: 1e-3 * step / 100 for step in range(1, 11)}, 1e-3, [], 10)
    assert guess is not None
    assert (dict(guess.settings), guess.rate, guess.hinted) == ({"name": "constant", "warmup": 100}, 1e-3, False)
