"""Predicted beside measured: what counts, how far they are apart, and the sentences on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_rows import ONE, SAME, compared
from unipar.comparison import store
from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.results.comparison import Comparison
from unipar.results.forecast.forecast_difference import (
    describe_forecast,
    forecast_differences,
    measured_step,
    summarise_differences,
)
from unipar.results.forecast.records import Forecast, ForecastPhase, ForecastWorld, StrategyForecast
from unipar.results.result_files import parse_comparison

SETUP = PhasePeak(name="built", peak=9_000, held={"parameters": 9_000})
FORWARD = PhasePeak(name="forward", peak=1_500, held={"parameters": 1_000, "activations": 500})
FULL = PhasePeak(
    name="backward", peak=2_000, held={"parameters": 1_000, "activations": 600, "library": 300, "runtime": 100}
)
SENT = {"data": {"all_reduce": 400}}


def account(rank: int = 0, **changed: Any) -> MemoryAccount:
    told: dict[str, Any] = {"phases": (SETUP, FORWARD, FULL), "peaks": (1_900, 2_000), "sent_along": SENT}
    more: dict[str, Any] = {"method": "m", "device": "cpu", "base": 0, "sent_by": "records"}
    return MemoryAccount(rank=rank, **(more | told | changed))


def planned(peak: int, sent: dict[str, dict[str, int]] = SENT, strategy: str = "native/nothing") -> StrategyForecast:
    return StrategyForecast(
        strategy=strategy, phases=(ForecastPhase(name="backward", peak=peak, held={"parameters": peak}),), sent=sent
    )


def test_what_is_measured_of_a_step() -> None:
    """Neither setting up nor what libraries and Python hold; the rank that is fullest in a step."""
    low = account(1, phases=(SETUP, FORWARD), peaks=(1_500,))
    step = measured_step([low, account()])
    assert step is not None
    assert (step.phase, step.low, step.high, step.peak) == ("backward", 1_500, 1_600, 1_600)
    assert step.held == {"parameters": 1_000, "activations": 600}
    assert step.sent == SENT
    assert measured_step([]) is None
    assert measured_step([account(phases=(SETUP,))]) is None


def test_a_workspace_of_a_library_does_not_choose_the_moment() -> None:
    """The peak has 700 bytes of a library and 900 of tensors; at another moment of that phase tensors had 1,200."""
    full = PhasePeak(
        name="backward",
        peak=1_600,
        held={"parameters": 800, "temporaries": 100, "library": 700},
        tensors={"parameters": 800, "temporaries": 400},
    )
    step = measured_step([account(phases=(SETUP, full), peaks=(1_590, 1_600))])
    assert step is not None
    assert (step.held, step.low, step.high) == ({"parameters": 800, "temporaries": 400}, 1_190, 1_200)


@pytest.mark.parametrize(("peak", "off"), [(1_500, 0.0), (1_550, 0.0), (1_600, 0.0), (1_650, 0.03125), (1_200, -0.2)])
def test_the_distance_is_that_from_the_range(peak: int, off: float) -> None:
    """A peak between the lowest and the highest recorded step is right."""
    row = SAME.changed(memory=[account(), account(1)])
    (found,) = forecast_differences(Forecast(strategies=(planned(peak),)), [row])
    assert found.off == pytest.approx(off)


@pytest.mark.parametrize(
    ("told", "changed", "same", "differing"),
    [
        (SENT, {}, True, []),
        ({"data": {"all_reduce": 400, "broadcast": 0}}, {}, True, []),
        ({"data": {"all_reduce": 300}}, {}, False, [("data all_reduce", 300, 400)]),
        ({"tensor": {"all_reduce": 400}}, {}, False, [("data all_reduce", 0, 400), ("tensor all_reduce", 400, 0)]),
        ({}, {}, None, [("data all_reduce", 0, 400)]),
        (SENT, {"sent_along": {}, "sent_by": ""}, None, [("data all_reduce", 400, 0)]),
    ],
)
def test_bytes_sent_are_compared_to_the_byte(
    told: dict[str, dict[str, int]], changed: dict[str, Any], same: bool | None, differing: list[tuple[str, int, int]]
) -> None:
    """By axis and collective; nothing is said of what was not planned or not recorded."""
    row = SAME.changed(memory=[account(**changed), account(1, **changed)])
    (found,) = forecast_differences(Forecast(strategies=(planned(1_600, told),)), [row])
    assert (found.same_volume, list(found.differing_volumes())) == (same, differing)


@pytest.mark.parametrize(("across", "same"), [(100, True), (0, False)])
def test_bytes_between_machines_are_compared(across: int, same: bool) -> None:
    """Those of the rank that has most of them."""
    row = SAME.changed(memory=[account(), account(1, sent_across=100)])
    strategy = planned(1_600).model_copy(update={"sent_across": across})
    (found,) = forecast_differences(Forecast(strategies=(strategy,)), [row])
    assert found.same_volume is same
    assert list(found.differing_volumes()) == ([] if same else [("between machines", 0, 100)])


def test_which_strategies_are_compared() -> None:
    """Those that ran, and were planned and measured."""
    alone, full = [account(sent_along={})], [account(), account(1)]
    rows = [
        ONE.changed(memory=alone),
        SAME.changed(memory=full),
        SAME.changed(strategy="a", memory=[]),
        SAME.changed(strategy="b", memory=full, outcome="failed"),
        SAME.changed(strategy="c", memory=full),
    ]
    strategies = [
        planned(1_600, {}, "single"),
        *(planned(1_680, strategy=name) for name in ("native/nothing", "a", "b")),
    ]
    why = "it is not planned yet"
    told = Forecast(strategies=(*strategies, *(StrategyForecast(strategy=name, refusal=why) for name in "cde")))
    found = forecast_differences(told, rows)
    assert [each.strategy for each in found] == ["single", "native/nothing"]
    assert summarise_differences(found) == (
        "predicted peaks of 2 strategies are within 5.00 % of the measured ones (farthest: native/nothing); bytes sent "
        "are equal"
    )
    assert describe_forecast(told, rows)[1:] == ["plan: c, d and e are not planned: it is not planned yet"]
    assert forecast_differences(None, rows) == []


def test_sentences_below_the_table() -> None:
    """Why nothing was planned; which strategies send something else; nothing for an older file."""
    other = SAME.changed(memory=[account(), account(1)])
    told = Forecast(strategies=(planned(1_600, {"data": {"all_reduce": 300}}),))
    assert describe_forecast(told, [other]) == [
        "plan: predicted peaks of native/nothing are within 0.00 % of the measured ones; other bytes are sent than "
        "predicted in native/nothing"
    ]
    assert describe_forecast(Forecast(problem="planning was interrupted"), [other]) == [
        "plan: planning was interrupted"
    ]
    assert describe_forecast(None, [other]) == []
    assert describe_forecast(told, [SAME]) == [
        "plan: no memory was measured to compare predictions with; they are on the page"
    ]
    text = compared(ONE, other, forecast=Forecast(problem="planning was interrupted")).table(80)
    assert "plan: planning was interrupted" in text.splitlines()


def test_files_keep_it(tmp_path: Path) -> None:
    """All of it is in compare.json; a file of an earlier version has none."""
    world = ForecastWorld(ranks=4, samples=8, micro=2, peak=900, phase="backward")
    strategy = planned(1_600).model_copy(update={"worlds": (world,), "ways": ("micro 1 fits",)})
    told = Forecast(device="cuda", ranks=2, samples=8, share=4, memory=2_000, memory_from="GPU", strategies=(strategy,))
    store.write_comparison(tmp_path, {}, compared(ONE, SAME, forecast=told))
    file = tmp_path / "compare.json"
    data = json.loads(file.read_text("utf-8"))
    assert parse_comparison(file, data).forecast == told
    del data["forecast"]
    assert Comparison.read(data).forecast is None
