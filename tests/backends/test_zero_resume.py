"""A run that goes on under ZeRO from a checkpoint in which not all parameters have state of one kind."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.running import running
from unipar.errors import CheckpointError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # the library's own, of its own calls

MUON = {"name": "muon", "lr": 1e-2}


class Layers(unipar.Task):
    """Three layers that learn y = 2 x."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.frozen = frozen

    @override
    def model(self) -> Any:
        model = nn.Sequential(
            OrderedDict(first=nn.Linear(4, 6), act=nn.Tanh(), middle=nn.Linear(6, 6), last=nn.Linear(6, 4))
        )
        model.middle.requires_grad_(not self.frozen)
        return model

    @override
    def data(self) -> Any:
        x = torch.arange(1.0, 41.0).view(10, 4) / 10
        return TensorDataset(x, 2 * x)

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return (model(x) - y).square().mean()


def trained(folder: Path, steps: int, task: Layers | None = None, **sections: Any) -> list[float]:
    """Return the losses of a run."""
    folder.mkdir()
    optimizer = sections.pop("optimizer", {"name": "adamw", "lr": 1e-2})
    train = {"steps": steps, "optimizer": optimizer}
    with running(task or Layers(), folder, train=train, log={"every": 1}, **sections) as run:
        run.task.train(run)
    return [row["loss"] for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == "step"]


def zero(shard: str) -> dict[str, Any]:
    return {"backend": "deepspeed", "parallel": {"data": 1, "shard": shard}}


WAY = (
    "ZeRO keeps one kind of state for all parameters that are no matrices of Muon, so that train.optimizer.matrices "
    "and adamw_for, and what is trained, must be as they were; take that back, or go on in a strategy that keeps the "
    "state of each parameter by itself, as --backend native and horovod do"
)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_parameter_that_was_frozen_is_refused(shard: str, tmp_path: Path) -> None:
    """One process begins its moments and their count of steps anew, and ZeRO counts for all parameters together."""
    trained(tmp_path / "first", 2, checkpoint={}, task=Layers(frozen=True))
    path = str(tmp_path / "first/checkpoints/step-00000002")
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path / "again", 4, resume=path, **zero(shard))
    state = "exp_avg, exp_avg_sq, step of first.weight, and no state of middle.weight"
    assert str(caught.value) == f"the checkpoint has {state}: {WAY}"
    assert len(trained(tmp_path / "one", 4, resume=path)) == 2


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_other_matrices_are_refused(shard: str, tmp_path: Path) -> None:
    """One that Muon had and AdamW gets has no moments; one process begins them anew, and ZeRO cannot for one alone."""
    trained(tmp_path / "first", 2, checkpoint={}, optimizer=MUON, **zero(shard))
    changed = MUON | {"adamw_for": ["middle.*"]}
    path = str(tmp_path / "first/checkpoints/step-00000002")
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path / "again", 4, optimizer=changed, resume=path, **zero(shard))
    state = "exp_avg, exp_avg_sq, step of first.bias, and momentum_buffer of middle.weight"
    assert str(caught.value) == f"the checkpoint has {state}: {WAY}"
    losses = trained(tmp_path / "one", 4, optimizer=changed, resume=path)
    assert len(losses) == 2


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_more_matrices_begin_anew(shard: str, tmp_path: Path) -> None:
    """One that AdamW had and Muon gets begins without momentum, as in one process."""
    before = MUON | {"adamw_for": ["middle.*"]}
    trained(tmp_path / "first", 2, checkpoint={}, optimizer=before, **zero(shard))
    path = str(tmp_path / "first/checkpoints/step-00000002")
    one = trained(tmp_path / "one", 4, optimizer=MUON, resume=path)
    assert trained(tmp_path / "again", 4, optimizer=MUON, resume=path, **zero(shard)) == pytest.approx(one, rel=1e-6)
