"""Worlds of several sizes of strategies with axes beside the data's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scalings import made
from tests.support.task_text import TASK
from unipar import errors
from unipar.comparison.scale import scale, select_worlds
from unipar.config import Config, Strategy

TOY = Path(__file__).parents[1] / "support" / "toy"


def config(**changed: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8}, "device": "cpu", "train": {"steps": 14}} | changed)


AXES_STRATEGIES = ("toy/nothing", "toy/nothing+tensor2")


@pytest.mark.parametrize(
    ("batch", "plans"),
    [
        ({"total": 8}, ["2 both 8: 8 x 1", "4 strong 8: 4 x 1", "4 weak 16: 8 x 1"]),
        ({"micro": 2, "accumulate": 1}, ["2 both 4: 2 x 2", "4 strong 4: 2 x 1", "4 weak 8: 2 x 2"]),
    ],
)
def test_ranks_along_further_axes_share_their_samples(
    batch: dict[str, Any], plans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each world has as many ranks as asked for; its batch is cut for half as many, and totals are those of others."""
    monkeypatch.syspath_prepend(TOY)
    settings = config(batch=batch)
    selected = list(select_worlds(settings, [2, 4], [Strategy.parse(strategy) for strategy in AXES_STRATEGIES], "cpu"))
    worlds = {
        strategy: [world for world, _, _ in selected if world.strategy == strategy] for strategy in AXES_STRATEGIES
    }
    said = [f"{w.ranks} {w.table_head[-1]} {w.samples}: {w.micro} x {w.accumulate}" for w in worlds[AXES_STRATEGIES[1]]]
    assert said == plans
    assert [w.samples for w in worlds[AXES_STRATEGIES[0]]] == [w.samples for w in worlds[AXES_STRATEGIES[1]]]
    for world, row, at in selected:
        assert at is not None
        assert (at.ranks, str(at.strategy), row.outcome) == (world.ranks, world.strategy, "waits")
        sizes = at.sizes
        assert (sizes.total, sizes.micro, sizes.accumulate) == (world.samples, world.micro, world.accumulate)
        assert (at.config.parallel.data, at.config.parallel.ranks) == (sizes.ranks, world.ranks)


def test_worlds_that_the_axes_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out with a sentence; the smallest world that is divided is the reference for the others."""
    monkeypatch.syspath_prepend(TOY)
    strategy = Strategy.parse("toy/nothing+tensor2")
    selected = list(select_worlds(config(), [1, 2, 3, 4], [strategy], "cpu"))
    assert [(world.ranks, row.outcome) for world, row, _ in selected] == [
        (1, "refused"),
        (3, "refused"),
        (2, "waits"),
        (4, "waits"),
        (4, "waits"),
    ]
    assert selected[1][1].note == "toy/nothing+tensor2 needs a multiple of 2 ranks (tensor 2), and there are 3"
    timed_rows = [
        row if at is None else row.changed(outcome="ran", losses=[1.0, 0.5], seconds=[[seconds]])
        for (_, row, at), seconds in zip(selected, (0, 0, 0.08, 0.05, 0.1), strict=True)
    ]
    scaled = made(*zip([world for world, _, _ in selected], timed_rows, strict=True))
    assert [scaled.efficiency(world) for world in scaled.worlds] == [None, None, 1.0, *[pytest.approx(0.8)] * 2]
    assert scaled.batches() == [
        "strong: 8 samples a step in every world; weak: 8 for each rank, or group of ranks, with samples of its own"
    ]
    lines = [line.split() for line in scaled.tables(120)[0]]
    assert lines[1][:4] == ["toy/nothing+tensor2", "1", "both", "refused:"]
    assert ["toy/nothing+tensor2", "4", "weak", "100", "[100..100]", "160", "1.60", "80", "%", "-"] in lines


def test_strategies_with_other_axes_may_have_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a rank is told for each strategy."""
    monkeypatch.syspath_prepend(TOY)
    strategies = [Strategy.parse(strategy) for strategy in AXES_STRATEGIES]
    selected = list(select_worlds(config(), [2, 4], strategies, "cpu"))
    assert made(*[(world, row) for world, row, _ in selected]).batches() == [
        "strong: 8 samples a step in every world of toy/nothing; weak: 4 for each rank",
        "strong: 8 samples a step in every world of toy/nothing+tensor2; weak: 8 for each rank, or group of ranks, "
        "with samples of its own",
    ]


def test_no_world_that_the_axes_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size has its sentence, and nothing starts."""
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    given = config().model_dump(exclude_unset=True, mode="json")
    given |= {"task": {"use": f"{tmp_path}/task.py:Sums"}, "out": str(tmp_path / "out")}
    monkeypatch.syspath_prepend(TOY)
    with pytest.raises(errors.Unsupported) as e:
        scale(given, worlds=[1, 3], strategies=["toy/nothing+pipeline2"])
    assert not (tmp_path / "out").exists()
    assert e.value.reasons == (
        "toy/nothing+pipeline2 needs a multiple of 2 ranks (pipeline 2), and there are 1",
        "toy/nothing+pipeline2 needs a multiple of 2 ranks (pipeline 2), and there are 3",
    )
