"""The example with two towers: the loss of the whole batch is learned in any cut, and the towers find one another."""

from __future__ import annotations

from pathlib import Path

import pytest

import unipar

pytestmark = pytest.mark.forked

ROOT = Path(__file__).parents[2]


def train(out: Path, micro: int, steps: int) -> unipar.Report:
    given = {"backend": "single", "parallel.data": 1, "batch.micro": micro, "out": str(out), "log.every": 1}
    given |= {"train.steps": steps, "eval.every": steps, "task.args": {"channels": 8, "width": 32, "samples": 1024}}
    return unipar.launch(ROOT / "configs" / "two_towers.yaml", overrides=given, quiet=True)


def test_the_towers_find_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a guess among 128 to the right caption for most of 300 pictures, of 180 captions, in 48 steps."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = train(tmp_path / "run", 64, 48)
    losses = dict(report.losses)
    assert 4.7 < losses[1] < 5.5  # ln 128 = 4.85
    assert losses[48] < 2.0
    assert report.evals[-1][1]["found"] > 0.4


def test_the_cut_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches of 8 give the losses of 128 samples at once."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole, cut = train(tmp_path / "whole", 128, 4), train(tmp_path / "cut", 8, 4)
    assert [loss for _, loss in cut.losses] == pytest.approx([loss for _, loss in whole.losses], abs=2e-5)
    assert len(cut.losses) == 4
