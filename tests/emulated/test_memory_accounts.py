"""Accounts of memory on the emulated device: they close to the byte in every strategy, and plans are near them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.memory_accounts import AccountCheck, check_accounts
from tests.support.softcuda.trainings.strategies import MIXTURES, TRAININGS, EmulatedTraining

ROW: dict[str, Any] = {
    "failure": "",
    "notes": [],
    "allocator": [512, 1024],
    "peaks": [512, 1024],
    "sums": [512, 1024],
    "unnamed": 0.01,
    "plan": -0.02,
}


@pytest.mark.emulated
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16", "bf16-master"])
def test_accounts_close_to_the_byte(precision: str, emulated: EmulatedDevice) -> None:
    """In each phase and on each rank the peak and the sum of its parts are the allocator's own peak."""
    checks = check_accounts(emulated, precision)
    assert {t.strategy for t in TRAININGS if precision in t.precisions and t.ranks == 2} <= checks.keys()
    assert {strategy: str(check) for strategy, check in checks.items() if not check.is_good} == {}


@pytest.mark.emulated
def test_accounts_on_four_ranks(emulated: EmulatedDevice) -> None:
    """Parameters split by FSDP2 and over matrices."""
    checks = check_accounts(emulated, "fp32", ranks=4)
    assert set(checks) == {"single", *(t.strategy for t in TRAININGS if t.ranks == 4)}
    assert {strategy: str(check) for strategy, check in checks.items() if not check.is_good} == {}


@pytest.mark.emulated
def test_accounts_of_one_rank(emulated: EmulatedDevice) -> None:
    """A world of one keeps DDP's buckets, but not Accelerate's: it wraps no model of one process on a GPU."""
    alone = [
        EmulatedTraining(strategy, ranks=1)
        for strategy in ("native/nothing", "accelerate/nothing", "deepspeed/nothing")
    ]
    checks = check_accounts(emulated, "fp32", alone, ranks=1)
    assert list(checks) == ["single", *(training.strategy for training in alone)]
    assert {strategy: str(check) for strategy, check in checks.items() if not check.is_good} == {}


@pytest.mark.emulated
def test_accounts_of_experts(emulated: EmulatedDevice) -> None:
    """Of a mixture whose rows are even, as a plan assumes: over experts, and over matrices around whole ones."""
    task = {"use": f"{MIXTURES}:EvenMixtral", "args": {"kernel": "batched_mm", "auxiliary": False}}
    strategies = ("native/nothing+expert2", "native/parameters+expert2", "native/nothing+tensor2")
    checks = check_accounts(emulated, "fp32", [EmulatedTraining(strategy) for strategy in strategies], task=task)
    assert list(checks) == ["single", *strategies]
    assert {strategy: str(check) for strategy, check in checks.items() if not check.is_good} == {}


def test_a_good_account() -> None:
    """All figures at their limits."""
    check = AccountCheck.of(ROW)
    assert (check.is_good, str(check)) == (True, "0 bytes apart, 1.00 % unnamed, plan -2.00 %")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peaks": [512, 1023]}, "1 bytes apart, 1.00 % unnamed, plan -2.00 %"),
        ({"sums": [500, 1024]}, "12 bytes apart, 1.00 % unnamed, plan -2.00 %"),
        ({"unnamed": 0.03}, "0 bytes apart, 3.00 % unnamed, plan -2.00 %"),
        ({"plan": 0.021}, "0 bytes apart, 1.00 % unnamed, plan +2.10 %"),
        ({"plan": None}, "0 bytes apart, 1.00 % unnamed, no plan"),
        ({"failure": "failed: rank 1"}, "failed: rank 1"),
        ({"notes": ["the history and the allocator differ"]}, "the history and the allocator differ"),
        ({"allocator": [], "peaks": [], "sums": []}, "no phase was recorded"),
    ],
)
def test_a_bad_account(change: dict[str, Any], said: str) -> None:
    """Each figure that is beyond its limit."""
    check = AccountCheck.of(ROW | change)
    assert (check.is_good, str(check)) == (False, said)
