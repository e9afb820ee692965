"""`eval.stop`: where a run ends, what it says, and how it goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typing_extensions import override

from tests.support.running import Line, running
from unipar.config.config_source import load_config_file
from unipar.errors import ConfigError, TaskError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.training_run import TrainingRun


class Scripted(Line):
    """A task whose evaluations give these values one after another: that of an evaluation follows from its step."""

    def __init__(self, values: Sequence[float], name: str = "loss") -> None:
        self._values, self._name = values, name
        self._run: TrainingRun

    @override
    def train(self, run: Any) -> None:
        self._run = run
        super().train(run)

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {self._name: self._values[self._run.done - 1]}


VALUES = [5.0, 4.0, 4.5, 4.0, 3.0, 3.5, float("nan"), 3.0, 1.0]
"""The best are those after steps 1, 2 and 5: three without an improvement end with step 8, two with step 4."""


def _settings(patience: int = 3, mode: str = "min", steps: int = 9, **more: Any) -> dict[str, Any]:
    train = {"steps": steps, "optimizer": {"name": "sgd", "lr": 1e-3}}
    stop = {"metric": "loss", "mode": mode, "patience": patience}
    return {"train": train, "eval": {"every": 1, "check": False, "stop": stop}} | more


def _trained(folder: Path, task: Scripted, **sections: Any) -> int:
    folder.mkdir(exist_ok=True)
    with running(task, folder, **sections) as run:
        task.train(run)
        return run.done


def _said(folder: Path) -> list[str]:
    return [row["said"] for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == "early stop"]


@pytest.mark.parametrize(("patience", "mode", "end"), [(3, "min", 8), (2, "min", 4), (1, "min", 3), (4, "min", 9),
                                                       (3, "max", 4)])  # fmt: skip
def test_where_a_run_ends(tmp_path: Path, patience: int, mode: str, end: int) -> None:
    """After so many evaluations without an improvement; a value as good as the best is none, nor is NaN."""
    assert _trained(tmp_path, Scripted(VALUES), **_settings(patience, mode)) == end
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row["steps"] for row in rows if row["event"] == "end"] == [end]
    assert len([row for row in rows if row["event"] == "eval"]) == end


def test_what_it_says(tmp_path: Path) -> None:
    """The metric, how often, the best value and its step; and where there was none."""
    _trained(tmp_path / "a", Scripted(VALUES), **_settings(3))
    assert _said(tmp_path / "a") == [
        "eval.stop: loss has not improved in 3 evaluations (the best was 3, after step 5): the run ends after step 8"
    ]
    _trained(tmp_path / "b", Scripted([float("nan")]), **_settings(1))
    assert _said(tmp_path / "b") == [
        "eval.stop: loss has not improved in 1 evaluation (it never was a finite number): the run ends after step 1"
    ]
    _trained(tmp_path / "c", Scripted(VALUES), **_settings(4))
    assert _said(tmp_path / "c") == []


@pytest.mark.parametrize("at", range(1, 8))
def test_a_resumed_run_ends_where_it_would_have_ended(tmp_path: Path, at: int) -> None:
    """Wherever it was interrupted."""
    saves = {"every": at, "async": False}
    _trained(tmp_path / "a", Scripted(VALUES), **_settings(3, steps=at, checkpoint=saves))
    saved = str(tmp_path / "a" / "checkpoints" / f"step-{at:08d}")
    assert _trained(tmp_path / "b", Scripted(VALUES), **_settings(3, resume=saved)) == 8


def test_a_run_that_had_ended_stays_so_or_goes_on_with_more_patience(tmp_path: Path) -> None:
    """From the checkpoint that it saved at its end; another mode counts anew."""
    _trained(tmp_path / "a", Scripted(VALUES), **_settings(2, checkpoint={"async": False}))
    saved = str(tmp_path / "a" / "checkpoints" / "step-00000004")
    assert _trained(tmp_path / "b", Scripted(VALUES), **_settings(2, resume=saved)) == 4
    assert _said(tmp_path / "b") == [
        "eval.stop: loss has not improved in 2 evaluations (the best was 4, after step 2): the run ends after step 4"
    ]
    assert _trained(tmp_path / "c", Scripted(VALUES), **_settings(3, resume=saved)) == 8
    assert _trained(tmp_path / "d", Scripted(VALUES), **_settings(2, "max", resume=saved)) == 8


def test_a_second_evaluation_after_the_same_step_is_not_counted(tmp_path: Path) -> None:
    """The loop's own and that of `eval.every`."""

    class Twice(Scripted):
        @override
        def train(self, run: Any) -> None:
            self._run = run
            for local_batch in run.batches():
                run.step(local_batch)
                run.evaluate()

    task = Twice(VALUES)
    assert _trained(tmp_path, task, **_settings(3)) == 8


def test_what_is_refused(tmp_path: Path) -> None:
    """A metric that the evaluation has not, a stop without evaluations, a patience of none."""
    with pytest.raises(TaskError) as e:
        _trained(tmp_path, Scripted(VALUES, "f1"), **_settings(3))
    assert str(e.value) == "eval.stop.metric: the evaluation has no 'loss'; it has f1"
    file = tmp_path / "x.yaml"
    for given, sentence in {
        "{stop: {patience: 2}}": "stop is decided after evaluations, and there are none; give every, or leave stop out",
        "{every: 1, stop: {patience: 0}}": "eval.stop.patience",
    }.items():
        file.write_text(f"batch: {{total: 4}}\ntrain: {{steps: 3}}\neval: {given}\n", "utf-8")
        with pytest.raises(ConfigError) as error:
            load_config_file(file)
        assert sentence in str(error.value)
