"""Strategies on the emulated device: losses of the CPU, no race, and a budget of waits for the host."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.softcuda.findings import DeviceFinding
from tests.support.softcuda.processes import EmulatedDevice, EmulatedRun
from tests.support.softcuda.trainings.strategies import (
    TRAININGS,
    EmulatedTraining,
    judge,
    largest_difference,
    losses_of_one_process,
    waits_of_a_step,
)

BIT = 2.4e-7
"""One bit of a loss between 2 and 4; twice as much is one bit of a loss between 4 and 8, as the first ones are."""

ZERO = {"copy from pageable memory in deepspeed/runtime/utils.py": 1.0, "item in deepspeed/runtime/utils.py": 2.0}
"""Waits of DeepSpeed's stages 1 and 2: a table of gradients' norms, the norm, and whether it is finite."""

ZERO_3 = {
    "copy from pageable memory in runtime/zero/stage3.py": 1.0,
    "device in deepspeed/accelerator/cuda_accelerator.py": 1.0,
    "item in deepspeed/runtime/utils.py": 1.0,
    "stream in runtime/zero/stage3.py": 2.0,
}
"""Waits of its stage 3: also for gradients of each backward, and before it frees what it has gathered."""

STRATEGIES = {
    "single": (0.0, {}),
    "native/nothing": (BIT, {}),
    "native/optimizer": (BIT, {}),
    "native/gradients": (BIT, {}),
    "native/parameters": (BIT, {}),
    "native/nothing+tensor2": (2 * BIT, {}),
    "native/nothing+pipeline2": (BIT, {}),
    "native/nothing+context2": (2 * BIT, {}),
    "deepspeed/nothing": (BIT, {}),
    "deepspeed/nothing+tensor2": (2 * BIT, {}),
    "deepspeed/optimizer": (BIT, ZERO),
    "deepspeed/gradients": (BIT, ZERO),
    "deepspeed/parameters": (BIT, ZERO_3),
    "accelerate/nothing": (BIT, {}),
    "accelerate/nothing+tensor2": (2 * BIT, {}),
    "accelerate/gradients": (BIT, {}),
    "accelerate/parameters": (BIT, {}),
    "accelerate/optimizer+zero": (BIT, ZERO),
    "accelerate/parameters+zero": (BIT, ZERO_3),
}
"""How far losses in fp32 may be from those of the CPU, and a rank's waits in a step between two logged ones."""


@cache
def training_of(strategy: str) -> EmulatedTraining:
    (training,) = (training for training in TRAININGS if training.strategy == strategy)
    return training


@pytest.fixture(scope="module")
def one(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process on the CPU."""
    return losses_of_one_process(forks, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_on_the_cpu(
    strategy: str, emulated: EmulatedDevice, forks: Forks, one: list[float], tmp_path: Path
) -> None:
    """Losses are those of the CPU, no stream reads too early, and a step between two logged ones keeps its budget."""
    near, waits = STRATEGIES[strategy]
    training = training_of(strategy)
    run = training.run(emulated, "fp32", tmp_path)
    assert judge(training, "fp32", run, one) == ""
    assert largest_difference(run.result, training.losses_on_cpu(forks, tmp_path)) <= near
    assert waits_of_a_step(training, run) == waits


def test_positions_traded_for_heads(emulated: EmulatedDevice, forks: Forks, one: list[float], tmp_path: Path) -> None:
    """Ranks on devices exchange positions for heads without a race and without a wait, to the losses of the CPU."""
    training = EmulatedTraining("native/nothing+context2", {"options": {"native": {"attention": "ulysses"}}})
    run = training.run(emulated, "fp32", tmp_path)
    assert judge(training, "fp32", run, one) == ""
    assert largest_difference(run.result, training.losses_on_cpu(forks, tmp_path)) <= 2 * BIT
    assert waits_of_a_step(training, run) == {}


OVERFLOW = {"copy to the host in unipar/engines/loss_scale.py": 1.0}
"""DeepSpeed takes the loss scale of fp16 as a number, which depends on the norm of the step before."""

UNFUSED = {
    "copy from pageable memory in deepspeed/runtime/utils.py": 2.0,
    "item in deepspeed/runtime/utils.py": 27.0,
}
"""Waits of DeepSpeed's stage 0 with weights in 16 bits: norms of each of 24 gradients."""

IN_16_BITS = {
    "bf16-mixed": {},
    "fp16": {strategy: OVERFLOW for strategy in STRATEGIES if "deepspeed" in strategy or "zero" in strategy},
    "bf16-master": {
        "deepspeed/nothing": UNFUSED,
        "deepspeed/optimizer": {"item in runtime/zero/stage_1_and_2.py": 1.0},
        "deepspeed/gradients": {"item in runtime/zero/stage_1_and_2.py": 1.0},
        "accelerate/optimizer+zero": {"item in runtime/zero/stage_1_and_2.py": 1.0},
    },
}
"""Waits besides those of the strategy in fp32."""

PLAYED = (("native/parameters", "bf16-mixed"), ("native/nothing", "fp16"))
"""Precisions that `make test` plays."""


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        pytest.param(strategy, precision, marks=() if (strategy, precision) in PLAYED else pytest.mark.emulated)
        for strategy in STRATEGIES
        for precision in training_of(strategy).precisions[1:]
    ],
)
def test_in_16_bits(strategy: str, precision: str, emulated: EmulatedDevice, one: list[float], tmp_path: Path) -> None:
    """Losses are near those in fp32, and not the same; the budget is that of fp32 and what is known besides."""
    training = training_of(strategy)
    run = training.run(emulated, precision, tmp_path)
    assert judge(training, precision, run, one) == ""
    assert largest_difference(run.result, one) > 1e-5
    assert waits_of_a_step(training, run) == STRATEGIES[strategy][1] | IN_16_BITS[precision].get(strategy, {})


def test_a_result_that_is_wrong() -> None:
    """The judge itself: losses too far, a rank on the CPU, a race."""
    training = EmulatedTraining("native/nothing")
    waits = tuple(DeviceFinding("wait", "item", (), pid) for pid in (1, 2))
    race = DeviceFinding("race", "x reads what y wrote", ("a.py:1",), 1)

    def said(*losses: float, findings: tuple[DeviceFinding, ...] = waits) -> str:
        return judge(training, "fp32", EmulatedRun(list(losses), 0, "", findings), [1.0, 0.5])

    assert said(1.0, 0.5) == ""
    assert said(1.0, 0.6) == "losses are 0.1 apart"
    assert said(1.0, float("nan")) == "losses are nan apart"
    assert said(1.0, 0.5, findings=waits[:1]) == "not each rank has used the device"
    assert said(1.0, 0.5, findings=(*waits, race)) == "race: x reads what y wrote (a.py:1)"
    failed = EmulatedRun(None, 1, "Traceback\nValueError: no\n", ())
    assert judge(training, "fp32", failed, [1.0, 0.5]) == "ValueError: no"


def test_waits_are_counted_in_steps_between_two_logged_ones() -> None:
    """With two ranks and two such steps each wait is a quarter; earlier and later ones do not count."""
    found = tuple(
        DeviceFinding(kind, text, ("unipar/x.py:3", "y.py:4"), pid, step)
        for kind, text, step, pid in [
            ("wait", "item", 6, 1),
            ("wait", "item", 7, 2),
            ("wait", "item", 5, 1),
            ("wait", "item", 8, 1),
            ("unpinned", "to the device", 7, 1),
            ("race", "x reads what y wrote", 7, 1),
        ]
    )
    run, training = EmulatedRun([1.0], 0, "", found), EmulatedTraining("native/nothing")
    assert waits_of_a_step(training, run) == {"item in unipar/x.py": 0.5, "to the device in unipar/x.py": 0.25}
    assert waits_of_a_step(training, run, lines=True) == {
        "item in unipar/x.py:3": 0.5,
        "to the device in unipar/x.py:3": 0.25,
    }


@pytest.mark.emulated
@pytest.mark.parametrize("strategy", [t.strategy for t in TRAININGS if t.strategy not in STRATEGIES])
def test_on_more_ranks(strategy: str, emulated: EmulatedDevice, one: list[float], tmp_path: Path) -> None:
    """Strategies that need four ranks wait for no more than those that need two."""
    training = training_of(strategy)
    run = training.run(emulated, "fp32", tmp_path)
    assert judge(training, "fp32", run, one) == ""
    assert waits_of_a_step(training, run) == STRATEGIES[strategy.removesuffix("+tensor2")][1]
