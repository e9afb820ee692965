"""Keys of `eval` that have no effect in a run that never evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.support.running import Line, running
from unipar.errors import ConfigError


@pytest.mark.parametrize(("key", "value"), [("batches", 2), ("check", False)])
def test_eval_without_every(tmp_path: Path, key: str, value: Any) -> None:
    """The default loop evaluates only where eval.every says so."""
    with pytest.raises(ConfigError) as e, running(Line(), tmp_path, eval={key: value}) as run:
        run.train()
    assert str(e.value) == (
        f"eval.{key}: {str(value).lower()} has no effect: nothing is evaluated without eval.every; give it, or leave "
        "eval out"
    )


def test_a_loop_of_its_own_may_evaluate(tmp_path: Path) -> None:
    """run.evaluate() reads eval.batches, with and without eval.every."""

    class Evaluating(Line):
        @override
        def train(self, run: Any) -> None:
            for local_batch in run.batches():
                run.step(local_batch)
            self.means = run.evaluate()

    task = Evaluating()
    with running(task, tmp_path, eval={"batches": 1}) as run:
        run.train()
    assert task.means["loss"] > 0


def test_an_evaluation_beyond_the_last_epoch(tmp_path: Path) -> None:
    """How many steps train.epochs are is known when the data is: ten samples in batches of four are three steps."""
    with (
        pytest.raises(ConfigError) as e,
        running(Line(), tmp_path, train={"epochs": 1}, eval={"every": 4}) as run,
    ):
        run.train()
    assert str(e.value) == (
        "eval.every: 4 is beyond the last step: train.epochs: 1 are 3 steps; lower it, or leave it out"
    )
