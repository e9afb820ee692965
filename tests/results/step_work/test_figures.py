"""What a step of a strategy does, from what its ranks recorded, and its table."""

from __future__ import annotations

import pytest

from tests.support.compared_rows import ONE, SAME, compared
from unipar.profiling.work import CompiledWork, RankWork
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult
from unipar.results.step_work.figures import StepFigures, flops_of_step, step_figures


def with_work(row: StrategyResult, *work: RankWork) -> StrategyResult:
    return StrategyResult.read(row.model_dump(mode="json") | {"work": [one.model_dump(mode="json") for one in work]})


def test_figures_of_two_ranks() -> None:
    """Tokens of the timed steps alone, the operations of all ranks, and the rank that waits least."""
    ranks = [
        RankWork(flops=4e9, weights=(7, 100, 200), waits=((0.1, 1.0), (0.3, 1.0))),
        RankWork(flops=4e9, waits=((0.6, 1.0), (0.4, 1.0))),
    ]
    assert step_figures(ranks, [0.1, 0.1], flops_of_step([("x", ranks)]), "fp32") == StepFigures(
        tokens_per_second=1500.0, flops_per_second=4e10, waiting=0.2, most_waiting=0.5
    )
    assert step_figures(ranks, [], 4e9, "fp32") == StepFigures()


@pytest.mark.parametrize(("devices", "mfu"), [(("a", "b"), 0.5), (("a", "a"), 1.0), (("a", "c"), None)])
def test_share_of_the_peak(devices: tuple[str, str], mfu: float | None) -> None:
    """Half of the peak of two devices is the whole peak of one that two ranks share; an unknown one has no peak."""
    names = {"a": "NVIDIA H200", "b": "NVIDIA H200", "c": "a device of tomorrow"}
    ranks = [RankWork(device=names[one], device_id=one) for one in devices]
    assert step_figures(ranks, [1.0], 989.4e12, "bf16-mixed").mfu == mfu


def worked() -> Comparison:
    compiled = CompiledWork(graphs=2, breaks={"print": 2}, recompiles={"size of x": 1})
    one = with_work(ONE, RankWork(flops=8e9, weights=(64.0,) * 6, waits=((0.1, 1.0),), compiled=compiled))
    ranks = [
        RankWork(flops=8e9, weights=(64.0,) * 6, waits=((share, 1.0),), compiled=compiled, notes=("a note",))
        for share in (0.05, 0.4)
    ]
    return compared(one, with_work(SAME, *ranks))


def test_the_table_of_work() -> None:
    """A table of its own below the first, with the reasons, and with what a task sleeps by itself."""
    text = worked().table()
    for line in (
        "work            tokens/s  GFLOP/s  waits  breaks  recompiles",
        "single              3200      400      -       2           1",
        "native/nothing      6400      800  5.0 %       2           1",
        "tokens/s: units of the task's weight(batch) a second",
        "one rank waits much longer, for a slower one: native/nothing 40 %",
        "native/nothing: a note",
        "graph break, 2 times: print",
        "recompile: size of x",
    ):
        assert line in text.splitlines()
    assert max(map(len, text.splitlines())) <= 80
    assert "single has no communication, and its thread sleeps for 10 % of a step" in text


def test_older_files_have_no_work() -> None:
    """A row without the key is read, and the table is not there."""
    data = SAME.model_dump(mode="json")
    del data["work"]
    assert StrategyResult.read(data) == SAME
    assert "work " not in compared(ONE, SAME).table()


def test_counts_that_differ_are_told() -> None:
    """All strategies do the same, so that another count is an error of the counting."""
    found = compared(with_work(ONE, RankWork(flops=8e9)), with_work(SAME, RankWork(flops=9e9), RankWork(flops=9e9)))
    assert "the operations of a step were counted otherwise in native/nothing 9e+09; shown with 8e+09" in " ".join(
        found.remarks()
    )
