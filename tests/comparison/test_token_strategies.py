"""`compare` and `scale` of batches by tokens: tokens a second, a plan of the largest microbatches, its bytes sent."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.scalings import worlds_with_work
from tests.support.world import ROOT
from unipar.comparison import compare
from unipar.comparison.make_forecast import MOST_SECONDS, make_forecast
from unipar.comparison.scale import select_worlds
from unipar.config import Config, Strategy
from unipar.results.comparison import Comparison

pytestmark = pytest.mark.forked


def _config(out: Path, name: str, batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": {"use": f"{ROOT}/tests/conformance/lengths.py:{name}"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": batch,
        "train": {"steps": 13, "optimizer": {"name": "adamw", "lr": 0.01, "eps": 1e-6}},
        "compare": {"repeat": 1},
        "log": {"every": 1},
        "out": str(out),
    }


@pytest.mark.sweep
def test_strategies_are_compared_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned peaks are those of the recorded steps, and the bytes sent are equal, the weight's and the loss's too."""
    monkeypatch.setattr(compare, "make_forecast", partial(make_forecast, most_seconds=20 * MOST_SECONDS))
    config = _config(tmp_path, "LateTokens", {"tokens": 70, "max_length": 8, "micro": 20})
    found = unipar.compare(config, strategies=["native/nothing", "native/optimizer"])
    assert isinstance(found, Comparison)
    assert found.unit == "tokens"
    assert [row.outcome for row in found.rows] == ["ran", "ran", "ran"]
    assert not found.disagreeing_rows
    assert all((rate := found.rate(row)) is not None and rate > 0 for row in found.rows)
    table = found.table(200)
    assert "tokens/s" in table
    assert "tokens/s: tokens, or units of the task's weight(batch) a second" in table
    assert "operations, padding included, are those of one step" in table
    assert "the operations of a step were counted otherwise" not in table
    assert found.forecast is not None
    assert found.forecast.problem == ""
    assert [strategy.refusal for strategy in found.forecast.strategies] == ["", "", ""]
    assert table.count("bytes sent are equal") == 1
    page = (tmp_path / "compare" / "report.html").read_text()
    assert "tokens/s" in page
    assert "The total batch of 70 tokens is kept on every number of ranks." in page


def test_worlds_have_one_budget_or_one_share() -> None:
    """Strong scaling keeps the tokens of a step, weak scaling those of a rank; the microbatch's limit stays."""
    given = {"batch": {"tokens": 70, "micro": 20}, "device": "cpu", "train": {"steps": 14}}
    worlds = select_worlds(Config.model_validate(given), [1, 2, 4], [Strategy.parse("native/nothing")], "cpu")
    assert [(w.name, w.samples, w.micro, w.share) for w, _, _ in worlds] == [
        ("native/nothing x1", 70, 20, 70),
        ("native/nothing x2 strong", 70, 20, 35),
        ("native/nothing x2 weak", 140, 20, 70),
        ("native/nothing x4 strong", 70, 20, 17),
        ("native/nothing x4 weak", 280, 20, 70),
    ]


def test_worlds_are_scaled_in_tokens(tmp_path: Path) -> None:
    """Strong worlds agree with the smallest one, and figures are tokens a second."""
    config = _config(tmp_path, "Counted", {"tokens": 70, "max_length": 8, "micro": 20})
    found = unipar.scale(config, worlds=[1, 2], strategies=["native/nothing"])
    assert found.unit == "tokens"
    assert [row.outcome for row in found.rows] == ["ran", "ran", "ran"]
    assert found.ran_and_agrees
    assert all((rate := found.rate(world)) is not None and rate > 0 for world in found.worlds)
    table = found.table(200)
    assert "strong: at most 70 tokens a step in every world; weak: 70 for each rank" in table
    assert "speed-up: tokens/s in proportion to the smallest world's" in table
    assert found.model_dump(mode="json")["worlds"][0]["samples_per_second"] is None
    page = (tmp_path / "scale" / "report.html").read_text()
    assert "tokens a step" in page
    assert "Tokens a second, relative to the smallest world." in page


def test_the_rate_is_that_of_the_tokens_in_each_step() -> None:
    """512 tokens in 80 ms, then in 50 ms on two ranks, 1,024 in 100 ms: whatever the budget of a step was."""
    found = worlds_with_work(unit="tokens")
    assert [found.rate(world) for world in found.worlds] == pytest.approx([6400, 10240, 10240])
    assert [found.speed_up(world) for world in found.worlds] == pytest.approx([1, 1.6, 1.6])
    assert [found.step_flops(row) for row in found.rows] == [8e9, None, 16e9]
