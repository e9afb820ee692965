"""`train.nonfinite`: an update whose norm is not finite, in every kind of strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.world import ROOT
from unipar.errors import ConfigError, NonFinite, UniparError

pytestmark = pytest.mark.forked

STRATEGIES = {
    "native/optimizer": {"data": 2, "shard": "optimizer"},
    "native/parameters": {"data": 2, "shard": "parameters"},
    "native/nothing+tensor2": {"data": 1, "tensor": 2},
    "native/nothing+pipeline2": {"data": 1, "pipeline": 2},
    "native/nothing+context2": {"data": 1, "context": 2},
    "deepspeed/nothing": {"data": 2},
    "deepspeed/gradients": {"data": 2, "shard": "gradients"},
    "deepspeed/parameters": {"data": 2, "shard": "parameters"},
    "horovod/nothing": {"data": 2},
    "accelerate/nothing": {"data": 2},
    "accelerate/parameters": {"data": 2, "shard": "parameters"},
}


def config_of(folder: Path, strategy: str, args: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    return {
        "task": {"use": f"{ROOT}/tests/support/root_task.py:OfRoot", "args": args or {}},
        "device": "cpu",
        "backend": strategy.partition("/")[0],
        "parallel": STRATEGIES.get(strategy, {"data": 1}),
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 5, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 1.0, **train},
        "log": {"every": 1},
        "checkpoint": {"every": 5},
        "out": str(folder / "run"),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_update_that_is_left_out(strategy: str, tmp_path: Path) -> None:
    """Losses are those of one process, in which the weights of step 3 are those of step 2."""
    alone = unipar.launch(config_of(tmp_path / "alone", "single/nothing", nonfinite="skip"), quiet=True)
    split = unipar.launch(config_of(tmp_path / "split", strategy, nonfinite="skip"), quiet=True)
    assert [loss for _, loss in split.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-5)


@pytest.mark.parametrize("strategy", ["native/nothing+pipeline2", "deepspeed/nothing", "horovod/nothing"])
def test_a_run_that_stops(strategy: str, tmp_path: Path) -> None:
    """The run ends in the step, before its update."""
    with pytest.raises(UniparError) as caught:
        unipar.launch(config_of(tmp_path, strategy), quiet=True)
    assert isinstance(caught.value, NonFinite)
    assert str(caught.value).startswith(
        "the norm of gradients is not finite at step 3, so the weights stay as they were before it: look at the loss's "
        "gradient (a root or a logarithm at 0), the rate (train.optimizer.lr) and the clip (train.clip), or leave such "
        "updates out (train.nonfinite: skip)"
    )


def test_a_run_that_only_skips_ends(tmp_path: Path) -> None:
    """After 20 updates in a row that were left out."""
    config = config_of(tmp_path, "single/nothing", {"bad": 3, "last": 99}, nonfinite="skip", steps=60)
    with pytest.raises(UniparError) as caught:
        unipar.launch(config, quiet=True)
    assert str(caught.value).startswith(
        "the norm of gradients is not finite in 20 steps in a row, 3 to 22, whose updates were left out "
        "(train.nonfinite: skip): look at the loss, the data and the rate (train.optimizer.lr)"
    )


def test_ranks_that_step_alone_cannot_skip(tmp_path: Path) -> None:
    """Each would skip other steps."""
    with pytest.raises(ConfigError) as caught:
        unipar.launch(config_of(tmp_path, "native/nothing", nonfinite="skip", local_steps=2), quiet=True)
    assert "local_steps (2) and nonfinite: skip exclude each other: each rank would skip different steps" in str(
        caught.value
    )
