"""ZeroRedundancyOptimizer under native/optimizer: who keeps what, and what it is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.support.running import Line, running
from tests.support.world import ROOT
from unipar.errors import TaskError
from unipar.launcher.processes.group import WorkerGroup

SPLIT: dict[str, Any] = {"backend": "native", "parallel": {"shard": "optimizer"}}
pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # torch's own, while it is imported


def test_each_rank_keeps_its_share(tmp_path: Path) -> None:
    """Any optimizer steps with its groups' own settings, less what others have; a third rank is left with nothing."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(tmp_path, 3, "tests.support.zero_inside:run", environment={"PYTHONPATH": path}) as workers:
        workers.wait()
    said = [json.loads((tmp_path / f"said-{rank}.json").read_text("utf-8")) for rank in range(3)]
    assert [rank["groups"] for rank in said] == [
        [[["weight"], 1.0, 0], [[], 0.2, 0.25]],
        [[[], 1.0, 0], [["bias"], 0.2, 0.25]],
        [[[], 1.0, 0], [[], 0.2, 0.25]],
    ]
    assert [rank["states"] for rank in said] == [["weight"], ["bias"], []]
    for rank in said:
        assert rank["stepped by"] == "Adagrad"
        assert rank["weight"] == pytest.approx([0.0] * 6, abs=1e-6)
        assert rank["bias"] == pytest.approx([0.8] * 3, abs=1e-6)


class Turning(Line):
    """Trains a complex number beside real ones."""

    @override
    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
        return model

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) + model.turn.abs().sum()


def test_one_dtype(tmp_path: Path) -> None:
    """A second one is refused, and the way out works."""
    with pytest.raises(TaskError) as e, running(Turning(), tmp_path, **SPLIT):
        pass
    assert str(e.value) == (
        "native/optimizer does not support parameters of torch.complex64 and torch.float32 together, as "
        "ZeroRedundancyOptimizer takes one dtype: use one for all, or set parallel.shard: nothing"
    )
    train = {"steps": 3, "optimizer": {"name": "sgd", "lr": 1e-3, "fused": False}}
    with running(Turning(), tmp_path, backend="native", train=train) as run:
        run.task.train(run)
        assert run.done == 3


@pytest.mark.parametrize(
    ("change", "wrapper"),
    [({}, "DDPEngine"), ({"train": {"steps": 1, "precision": "bf16-master"}}, "FSDP2Engine")],
)
def test_where_it_cannot(change: dict[str, Any], wrapper: str, tmp_path: Path) -> None:
    """FSDP2 takes over for bf16-master, as ZeroRedundancyOptimizer has no fp32 masters."""
    with running(Line(), tmp_path, **SPLIT, **change) as run:
        assert type(run.engine).__name__ == wrapper
