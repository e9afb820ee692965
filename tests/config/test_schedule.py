"""Schedules: the factors of PyTorch's own schedulers, falls and warm-ups, and what does not fit into the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, OneCycleLR, PolynomialLR, StepLR

from unipar.backend.export import functions_code
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.config.sections.schedule import (
    Constant,
    Cosine,
    InverseRoot,
    Linear,
    OneCycle,
    Polynomial,
    Schedule,
    Steps,
    WarmupStableDecay,
)
from unipar.errors import ConfigError

STEPS = 20


def config(**changes: Any) -> Config:
    return load_given_config({"batch": {"total": 32}, "train": {"steps": 1}}, changes).config


def factors(schedule: Schedule, steps: int = STEPS) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


def factors_of_torch(make: Callable[[SGD], LRScheduler]) -> list[float]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, rates = make(optimizer), list[float]()
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


OF_TORCH: list[tuple[Schedule, Callable[[SGD], LRScheduler]]] = [
    (Steps(every=6, gamma=0.5), lambda o: StepLR(o, step_size=6, gamma=0.5)),
    (Steps(milestones=(5, 12)), lambda o: MultiStepLR(o, milestones=[5, 12], gamma=0.1)),
    (Polynomial(power=1.5), lambda o: PolynomialLR(o, total_iters=STEPS - 1, power=1.5)),
    (Linear(min_lr_ratio=0.25), lambda o: LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=STEPS - 1)),
    (OneCycle(), lambda o: OneCycleLR(o, max_lr=1.0, total_steps=STEPS + 1)),
    (OneCycle(begin=0.1, min_lr_ratio=0.01, pct_start=0.4, shape="linear"),
     lambda o: OneCycleLR(o, max_lr=1.0, total_steps=STEPS + 1, pct_start=0.4, div_factor=10, final_div_factor=10,
                          anneal_strategy="linear")),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "theirs"), OF_TORCH)
def test_the_factors_of_pytorch(schedule: Schedule, theirs: Callable[[SGD], LRScheduler]) -> None:
    """OneCycleLR counts one step more, since it steps once behind the last update."""
    more = 1 if isinstance(schedule, OneCycle) else 0
    assert factors(schedule, STEPS + more)[:STEPS] == pytest.approx(factors_of_torch(theirs), abs=1e-12)


def test_warmup_stable_decay() -> None:
    """Up over 4 steps, level, and down over the last 5 to the end's share."""
    down = [1.0, 0.82, 0.64, 0.46, 0.28, 0.1]
    wanted = [0.25, 0.5, 0.75, 1.0, *[1.0] * 10, *down]
    assert factors(WarmupStableDecay(warmup=4, decay=5, min_lr_ratio=0.1)) == pytest.approx(wanted, abs=1e-12)
    sqrt = [1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0]
    assert factors(WarmupStableDecay(decay=4, shape="sqrt"))[-5:] == pytest.approx(sqrt, abs=1e-12)
    cosine = [1.0, 0.5, 0.0]
    assert factors(WarmupStableDecay(decay=2, shape="cosine"))[-3:] == pytest.approx(cosine, abs=1e-12)


def test_a_warm_up_before_falls() -> None:
    """Falls are counted from the first step, and the warm-up is on top of them."""
    assert factors(Steps(every=4, gamma=0.5, warmup=2))[:9] == [0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_an_inverse_root() -> None:
    """The factor is at 1/2 after three lengths of its warm-up, and without one at sqrt(1/2) after 10,000 steps."""
    assert factors(InverseRoot(warmup=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert InverseRoot(warmup=4).factor(4 + 12, 100) == 0.5
    assert InverseRoot().factor(10_000, 20_000) == 0.5**0.5
    assert InverseRoot(scale=5, warmup=2).factor(2 + 15, 100) == 0.5


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Linear(warmup=2, timing="transformers"), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        (Cosine(timing="transformers"), [1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
        (Constant(warmup=2, timing="transformers"), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        (Steps(every=3, gamma=0.5, warmup=2, timing="transformers"), [0.0, 0.5, 1.0, 0.5, 0.5, 0.5]),
        (InverseRoot(warmup=2, timing="transformers"), [0.0, 0.5, 1.0, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5]),
        (WarmupStableDecay(warmup=2, decay=2, min_lr_ratio=0.2, timing="transformers"), [0.2, 0.6, 1.0, 1.0, 1.0, 0.6]),
    ],
)
def test_the_timing_of_transformers(schedule: Schedule, wanted: list[float]) -> None:
    """A warm-up begins at rate 0, or at the end's of wsd, and the end would be one step after the last."""
    assert factors(schedule, 6) == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("schedule", [Cosine(warmup=0.12), Steps(every=9, warmup=0.12), InverseRoot(warmup=0.12)])
def test_a_share_of_the_steps(schedule: Schedule) -> None:
    """A warm-up of 12 % of 20 steps has 3 steps, as that of 3."""
    assert schedule.warmup_steps(STEPS) == 3
    assert factors(schedule) == factors(schedule.model_copy(update={"warmup": 3}))


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ({"name": "step"}, "schedule step needs one of every (steps between falls) and milestones (a list of steps)"),
        ({"name": "step", "every": 2, "milestones": [3]}, "schedule step needs one of every (steps between falls) and"),
        ({"name": "step", "milestones": [3, 2]}, "milestones must be ascending, each step once; got [3, 2]"),
        ({"name": "step", "milestones": [3, 20]}, "the rate would fall after step 20, and there are 20 steps; leave"),
        ({"name": "step", "every": 20}, "schedule.every (20) is not less than steps (20), so the rate would never"),
        ({"name": "wsd", "warmup": 9, "decay": 12},
         "schedule.warmup (9) and schedule.decay (12) are more than steps (20) together; give fewer steps of each"),
        ({"name": "wsd", "warmup": 0.42, "decay": 12},
         "schedule.warmup (9) and schedule.decay (12) are more than steps (20) together; give fewer steps of each"),
        ({"warmup": 21}, "schedule.warmup (21) is more than steps (20), so the rate would never reach its full value"),
        ({"warmup": 1.5}, "wanted a whole number of at least 0 or a number above 0 and below 1, got 1.5"),
        ({"name": "one-cycle", "warmup": 2}, "warmup (2) and one-cycle exclude each other: it rises by itself"),
        ({"name": "one-cycle", "timing": "transformers"},
         "timing (transformers) and one-cycle exclude each other: leave timing out"),
        ({"name": "one-cycle", "pct_start": 0.05}, "schedule.pct_start (0.05) is less than 2 of 20 steps"),
    ],
)  # fmt: skip
def test_refusals(schedule: dict[str, Any], sentence: str) -> None:
    """Each says the key, the numbers and the way out."""
    with pytest.raises(ConfigError) as caught:
        config(train={"steps": STEPS, "schedule": schedule})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(warmup=3), Linear(warmup=3, min_lr_ratio=0.1), Cosine(min_lr_ratio=0.2),
        Polynomial(warmup=2, power=3.0),
        Steps(every=3, warmup=2), Steps(milestones=(4, 9), gamma=0.3),
        WarmupStableDecay(warmup=2, decay=6, shape="sqrt", min_lr_ratio=0.1),
        Linear(warmup=3, min_lr_ratio=0.1, timing="transformers"), Cosine(timing="transformers"),
        Steps(every=3, warmup=2, timing="transformers"), InverseRoot(warmup=2, timing="transformers"),
        WarmupStableDecay(warmup=2, decay=6, min_lr_ratio=0.1, timing="transformers"),
        OneCycle(), OneCycle(pct_start=0.5, shape="linear"), InverseRoot(), InverseRoot(warmup=0.2),
        Cosine(warmup=0.12),
    ],
)  # fmt: skip
def test_an_exported_script_has_the_same_rates(schedule: Schedule) -> None:
    """The function rate() of a script, run, gives the factors to the last bits."""
    from types import SimpleNamespace

    outline: Any = SimpleNamespace(
        autocast=False, steps=STEPS, config=config(train={"steps": STEPS, "schedule": schedule.model_dump()})
    )
    functions = functions_code(outline)
    code = "import math\n" + functions[functions.index("def rate(") :].partition("def note(")[0]
    names: dict[str, Any] = {"STEPS": STEPS, "WARMUP": schedule.warmup_steps(STEPS)}
    exec(code, names)
    assert [names["rate"](step) for step in range(STEPS)] == pytest.approx(factors(schedule), abs=1e-15)
