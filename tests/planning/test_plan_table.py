"""A plan as text: refusals that several rows share, and what a plan for the CPU says of GPUs."""

from __future__ import annotations

import re
from typing import Literal

from unipar.planning.peaks import PredictedPeak
from unipar.planning.plan_table import format_plan
from unipar.planning.planned_strategy import PlannedStrategies, PlannedStrategy

HALF = "batch.total (32) is not a multiple of micro x data (8 x 8 = 64)"


def planned(strategy: str, ranks: int, phase: Literal["backward", "built"] = "backward") -> PlannedStrategy:
    return PlannedStrategy(strategy, ranks, 8, (PredictedPeak(phase, 2**20, {"activations": 2**20}, ()),))


def refused(strategy: str, ranks: int, why: str) -> PlannedStrategy:
    return PlannedStrategy(strategy, ranks, refusal=why)


def text_of(*rows: PlannedStrategy, device: str = "cpu") -> str:
    return format_plan(PlannedStrategies(rows, None, 0.05, device, 100, 1.0), 120)


def refusals_in(text: str) -> list[list[str]]:
    """Strategy and ranks of each row with a reason, and the reason."""
    lines = text.split("\n\n")[1].splitlines()[1:]
    return [re.split(" {2,}", line) for line in lines if "MiB" not in line]


def test_a_batch_that_a_world_does_not_divide_is_one_row() -> None:
    """The same sentence for all strategies, or for some of them, is there once, below the rows with figures."""
    strategies = ("native/nothing", "native/parameters", "horovod/nothing")
    rows = [row for strategy in strategies for row in (planned(strategy, 2), refused(strategy, 8, HALF))]
    text = text_of(*rows)
    assert refusals_in(text) == [["all 3 strategies", "8", HALF]]
    assert text.split("\n\n")[1].splitlines()[-1].startswith("all 3 strategies")
    text = text_of(*rows, planned("single", 8))
    assert refusals_in(text) == [["other 3 strategies", "8", HALF]]


def test_a_strategy_that_does_not_run_anywhere_is_one_row() -> None:
    """The same reason on all numbers of ranks is there once; on one of them, beside that number."""
    rows = [refused("horovod/nothing", 2, "no bf16"), refused("horovod/nothing", 8, "no bf16")]
    assert refusals_in(text_of(*rows, planned("native/nothing", 2))) == [["horovod/nothing", "all", "no bf16"]]
    some = [planned("horovod/nothing", 2), rows[1]]
    assert refusals_in(text_of(*some)) == [["horovod/nothing", "8", "no bf16"]]
    other = [refused("horovod/nothing", 2, "no"), rows[1]]
    assert [row[1:] for row in refusals_in(text_of(*other))] == [["2", "no"], ["8", "no bf16"]]


def test_a_plan_for_the_cpu_says_how_to_plan_for_gpus() -> None:
    """Also that the whole model of the set-up, where it is the peak, does not count there."""
    line = "planned for the CPU; --device cuda or --machine plans for GPUs"
    assert line in text_of(planned("native/nothing", 2)).splitlines()
    built = " ".join(text_of(planned("native/nothing", 2, "built")).split())
    assert f"{line}, where the whole model that rank 0 creates at set-up (built) does not count" in built
    assert "planned for the CPU" not in text_of(planned("native/nothing", 2), device="cuda")


def test_a_model_that_was_created_with_values() -> None:
    """The bytes taken are told where else it says that nothing is allocated."""
    rows = (planned("native/nothing", 2),)
    text = format_plan(PlannedStrategies(rows, None, 0.05, "cpu", 100, 1.0, allocated=2**20), 120)
    assert "100 parameters; planned in 1.0 s of CPU; model() needed their values: 1.0 MiB" in text.splitlines()
    assert "100 parameters; planned in 1.0 s of CPU, without allocating them" in text_of(*rows).splitlines()
