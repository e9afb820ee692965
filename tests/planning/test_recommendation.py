"""Which strategy a plan recommends, and why, from rows written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unipar.comparison.make_plan import simplicity
from unipar.config import Strategy
from unipar.planning.peaks import PredictedPeak
from unipar.planning.planned_strategy import PlannedStrategy
from unipar.planning.recommendation import recommend
from unipar.planning.speed import StepSpeed


def row(strategy: str, peak: int, seconds: float | None = None, **more: Any) -> PlannedStrategy:
    """Return a row of a strategy with that peak, which takes so many seconds for 100 samples."""
    speed = None if seconds is None else StepSpeed(seconds, 0.0, 0.0, 0.0, 0.0, 100.0, 0.4)
    phases = (PredictedPeak("backward", peak, {"activations": peak}, ()),)
    order = simplicity(Strategy.parse(strategy))
    return replace(
        PlannedStrategy(strategy, 2, 8, phases, largest=8, largest_peak=peak, speed=speed, simplicity=order), **more
    )


def chosen(*rows: PlannedStrategy, limit: int | None = 900, exclude: tuple[str, ...] = ()) -> tuple[str, int, str]:
    (found,) = recommend(rows, limit, exclude=exclude)
    return "" if found.row is None else found.row.strategy, found.micro, found.why


FAST = row("native/parameters", 500, 1.0)
SLOW = row("native/nothing", 800, 2.0)
LIKE = row("deepspeed/parameters", 400, 1.01)


def test_fits_then_fastest() -> None:
    """The fastest of those that fit; the fastest of all if there is no limit."""
    assert chosen(SLOW, FAST) == (
        "native/parameters",
        8,
        "it fits (500 B of 900 B), and it is the fastest of 2: computing 100%",
    )
    assert (
        chosen(SLOW, replace(FAST, largest=None, phases=row("native/parameters", 2000).phases))[0] == "native/nothing"
    )
    assert chosen(SLOW, FAST, limit=None)[2] == "it is the fastest of 2: computing 100%"


def test_then_simplest() -> None:
    """Of those that are as fast to two per cent; and of all that fit if there are no seconds."""
    assert chosen(LIKE, FAST, SLOW) == (
        "native/parameters",
        8,
        "it fits (500 B of 900 B), and it is the simplest of 2 that are within 2% of the fastest: computing 100%",
    )
    without = [replace(each, speed=None) for each in (LIKE, FAST, SLOW)]
    assert chosen(*without)[0] == "native/nothing"
    assert chosen(*without)[2] == "it fits (800 B of 900 B), and is the simplest of 3 strategies that fit"
    assert chosen(*without, limit=None)[2] == "it is the simplest of 3 strategies"
    assert chosen(without[0], limit=None)[2] == "it is the only strategy"
    assert chosen(without[2])[2] == "it fits (800 B of 900 B), and is the only strategy that does"


def test_what_the_user_excludes() -> None:
    """An excluded strategy is planned, and not recommended."""
    assert chosen(FAST, SLOW, exclude=("native/parameters",))[0] == "native/nothing"
    assert chosen(FAST, exclude=("native/parameters",)) == ("", 0, "no strategy can be planned here")


def test_a_smaller_microbatch() -> None:
    """A strategy that fits only with one is judged by its speed with that one."""
    small = replace(FAST, phases=SLOW.phases, largest=2, largest_peak=300, largest_speed=SLOW.speed)
    assert chosen(small, limit=700) == ("native/parameters", 2, "it fits (300 B of 700 B): computing 100%")


def test_nothing_fits() -> None:
    """The one that lacks least is named."""
    far, near = (replace(each, largest=None, least=least) for each, least in ((SLOW, 700), (FAST, 450)))
    assert chosen(far, near, limit=100) == (
        "",
        0,
        "nothing fits; native/parameters comes nearest, and needs 350 B more, whatever the micro",
    )


def test_each_number_of_ranks() -> None:
    """Has a recommendation of its own."""
    found = recommend([FAST, replace(SLOW, ranks=4), PlannedStrategy("horovod/nothing", 8, refusal="no")], None)
    assert [(each.ranks, each.row and each.row.strategy) for each in found] == [
        (2, "native/parameters"),
        (4, "native/nothing"),
        (8, None),
    ]


@pytest.mark.parametrize(
    ("simple", "less"),
    [
        ("single", "native/nothing"),
        ("native/nothing", "horovod/nothing"),
        ("horovod/nothing", "native/optimizer"),
        ("native/parameters", "native/parameters+tensor2"),
        ("deepspeed/gradients", "deepspeed/gradients+library"),
        ("accelerate/gradients", "native/parameters"),
    ],
)
def test_order_of_simplicity(simple: str, less: str) -> None:
    """One process; what splits less, along fewer axes, without a variant; the default backend."""
    assert simplicity(Strategy.parse(simple)) < simplicity(Strategy.parse(less))
