"""Learning rates that a run logs: those of the optimizer's groups, as they are in each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import unipar
from tests.support.run_folders import EXPERTS
from tests.support.run_logs import rows_of
from tests.support.running import Line, running
from tests.support.world import ROOT
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.engines.optimizer_engine import OptimizerEngine
from unipar.training.trained_parts import flatten_logged_step

pytestmark = pytest.mark.forked

EACH = {"log": {"every": 1}}


class Fast(Line):
    """Task whose groups have a rate of their own."""

    @override
    def groups(self, model: nn.Module) -> Any:
        return [{"params": model.parameters(), "lr": 1e-4}]


class Owned(Line):
    """Task whose optimizer has a rate of its own."""

    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=1e-3)


class Doubling(Line):
    """Task whose optimizer changes its rate before each update."""

    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        class Optimizer(torch.optim.SGD):
            @override
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    group["lr"] *= 2
                return super().step(closure)

        return Optimizer(groups)


class Tensors(Line):
    """Task whose optimizer has a rate that is a tensor."""

    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{**group, "lr": torch.tensor(group["lr"])} for group in groups])


class Blocks(nn.Module):
    """Three layers of a width of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoGroups(Line):
    """Task with two groups, the second of which is the last layer: a pipeline's first stage has nothing of it."""

    @override
    def model(self) -> nn.Module:
        return Blocks()

    @override
    def groups(self, model: Any) -> Any:
        return [{"params": model.layers[:2].parameters(), "lr": 0.008}, {"params": model.layers[2].parameters()}]


def logged(task: Line, folder: Path, lr: float, **sections: Any) -> list[Any]:
    """Return the rate in each logged row of a run whose config says `lr`."""
    named = {} if task.defines("optimizer") else {"name": "sgd"}
    train = {"steps": 3, "optimizer": {**named, "lr": lr}, **sections.pop("train", {})}
    with running(task, folder, **{**EACH, "train": train, **sections}) as run:
        task.train(run)
    return [row["lr"] for row in rows_of(folder, "step")]


@pytest.mark.parametrize(
    ("task", "lr", "expected"), [(Fast(), 0.01, 1e-4), (Owned(), 1e-9, 1e-3), (Doubling(), 1e-4, 2e-4)]
)
def test_a_rate_of_the_tasks_own(task: Line, lr: float, expected: float, tmp_path: Path) -> None:
    """The optimizer's rate is logged, not train.optimizer.lr."""
    assert logged(task, tmp_path, lr) == [expected] * 3


def test_a_warmup_and_a_scale_of_the_batch(tmp_path: Path) -> None:
    """Schedule and lr_scale are in the optimizer's rate already, and are applied once."""
    train = {"schedule": {"warmup": 2}, "lr_scale": {"rule": "linear", "base_batch_size": 2}}
    assert logged(Fast(), tmp_path, 0.01, train=train) == [1e-4, 2e-4, 2e-4]


def test_a_rate_that_is_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is a tensor is read in logged steps only, and is a number in the log and in the checkpoint."""
    reads: list[int] = []
    read = OptimizerEngine.learning_rates

    def counted(engine: OptimizerEngine) -> list[float]:
        reads.append(1)
        return read(engine)

    monkeypatch.setattr(OptimizerEngine, "learning_rates", counted)
    sections = {"log": {"every": 4}, "checkpoint": {}}
    assert logged(Tensors(), tmp_path, 0.5, train={"steps": 9}, **sections) == [0.5] * 3
    assert [row["step"] for row in rows_of(tmp_path, "step")] == [1, 5, 9]
    assert len(reads) == 3
    (group,) = inspect_checkpoint(tmp_path / "checkpoints/step-00000009").state["parts"]["model"]["groups"]
    assert group["settings"]["lr"] == 0.5


def test_a_checkpoint_has_the_rates_of_the_groups(tmp_path: Path) -> None:
    """Each group's settings have the rate of the last step."""
    logged(TwoGroups(), tmp_path, 0.0008, train={"schedule": {"name": "linear"}}, checkpoint={"every": 2})
    groups = inspect_checkpoint(tmp_path / "checkpoints/step-00000002").state["parts"]["model"]["groups"]
    assert [group["settings"]["lr"] for group in groups] == [0.004, 0.0004]


def test_a_tracker_gets_a_number_for_each_group() -> None:
    """Names end with the group's number; one rate of all groups is `lr` alone."""
    parts = {"actor": {"step": 1, "lr": 0.1}, "critic": {"step": 1, "lr": [0.2, 0.02]}}
    assert flatten_logged_step({"loss": 4.0, "lr": [0.5, 0.05]}) == {"loss": 4.0, "lr/0": 0.5, "lr/1": 0.05}
    assert flatten_logged_step({"parts": parts}) == {"lr/actor": 0.1, "lr/critic/0": 0.2, "lr/critic/1": 0.02}


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        ("single", {}),
        ("native", {"data": 2}),
        pytest.param("native", {"data": 2, "shard": "parameters"}, marks=pytest.mark.sweep),
        ("native", {"data": 1, "pipeline": 2}),
    ],
)
def test_two_groups_under_a_warmup(backend: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Rates are in the order of the groups, also where rank 0 has no parameter of the second."""
    config = {
        "task": {"use": f"{ROOT}/tests/training/test_rates.py:TwoGroups"},
        "backend": backend,
        "device": "cpu",
        "parallel": parallel,
        "batch": {"total": 4, "micro": 2},
        "train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.0008}, "schedule": {"warmup": 4}},
        "model": {"blocks": [f"layers.{i}" for i in range(3)]},
        "out": str(tmp_path / "run"),
        **EACH,
    }
    unipar.launch(config, quiet=True)
    rates = [row["lr"] for row in rows_of(tmp_path / "run", "step")]
    assert rates == [[0.002, 0.0002], [0.004, 0.0004], [pytest.approx(0.006), pytest.approx(0.0006)], [0.008, 0.0008]]


def test_trackers_get_the_least_even_layer_of_experts() -> None:
    """One number each, not one for each expert or layer."""
    assert flatten_logged_step({"loss": 4.0, "experts": EXPERTS}) == {
        "loss": 4.0,
        "experts/fullest": 3.0,
        "experts/entropy": 0.406,
        "experts/unused": 2,
        "experts/rank": 2.0,
        "experts/microbatch": 2.25,
    }
