"""Averages of weights in a plan: what each rank keeps of them, and what their update needs for a moment."""

from __future__ import annotations

from typing import Any

import pytest

import unipar
from tests.support.short_text import short_text
from unipar.prediction.terms import averaging_terms
from unipar.prediction.timeline import Moment, StepTimeline, Term

CONFIG: dict[str, Any] = {"task": short_text(), "device": "cpu", "batch": {"total": 8, "micro": 2}}
ALL = 4 * 8_128
"""Bytes of all parameters."""


def planned(strategy: str, ema: dict[str, Any] | None, precision: str = "fp32") -> Any:
    ranks = 1 if strategy == "single" else 2
    train = {"steps": 1, "ema": ema, "precision": precision}
    return unipar.plan({**CONFIG, "train": train}, strategies=[strategy], worlds=[ranks])


def averages(plan: Any) -> list[int]:
    """Return the bytes of averages in each phase of a step."""
    (row,) = plan.rows
    return [phase.held.get("averages", 0) for phase in row.phases if phase.phase != "built"]


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("single", ALL),
        pytest.param("native/nothing", ALL, marks=pytest.mark.sweep),
        pytest.param("native/optimizer", ALL, marks=pytest.mark.sweep),
        ("native/parameters", ALL // 2),
        ("native/nothing+tensor2", 19_968),
        ("horovod/nothing", ALL),
        pytest.param("accelerate/parameters", ALL // 2, marks=pytest.mark.sweep),
        pytest.param("deepspeed/nothing", ALL, marks=pytest.mark.sweep),
        ("deepspeed/gradients", ALL // 2),
        pytest.param("deepspeed/parameters", ALL // 2, marks=pytest.mark.sweep),
    ],
)
def test_each_rank_keeps_averages_of_what_it_updates(strategy: str, size: int) -> None:
    """In fp32, from the set-up on, whatever the phase; none without `train.ema`."""
    plan, without = planned(strategy, {}), planned(strategy, None)
    assert averages(plan) == [size] * 4
    assert averages(without) == [0] * 4
    assert "ema" in plan.table(200).split("\n\n")[1].splitlines()[0].split()
    assert "ema" not in without.table(200).split("\n\n")[1].splitlines()[0].split()


@pytest.mark.parametrize(
    "strategy", ["native/parameters", pytest.param("deepspeed/nothing", marks=pytest.mark.sweep), "deepspeed/gradients"]
)
def test_averages_of_masters(strategy: str) -> None:
    """Under bf16-master they are as large as the fp32 masters."""
    size = ALL if strategy == "deepspeed/nothing" else ALL // 2
    assert averages(planned(strategy, {}, "bf16-master")) == [size] * 4


MOMENTS = (Moment("forward", "begin"), Moment("update", "begin"), Moment("steady", "begin"))
MIB = 2**20


@pytest.mark.parametrize(
    ("kept", "freed", "needed"),
    [(10 * MIB, 0, 10 * MIB), (10 * MIB, 4 * MIB, 6 * MIB), (10 * MIB, 12 * MIB, 0), (90 * MIB, 4 * MIB, 12 * MIB)],
)
def test_what_their_update_needs(kept: int, freed: int, needed: int) -> None:
    """At most 16 MiB at once, of which some has been freed with the gradients."""
    terms = [
        Term("averages", "w", kept),
        Term("averages", "on the host", kept, place="host"),
        Term("gradients", "w", freed, 0, 2),
        Term("gradients", "bucket", freed),
    ]
    found = [*averaging_terms(StepTimeline((), {}, (), MOMENTS, averages=True), terms)]
    expected = [Term("temporaries", "distances of weights from their averages", needed, 1, 2)] if needed else []
    assert found == expected
