"""A run in the test's own process, and the smallest task that trains."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.launcher.processes.recompute import plan_recompute
from unipar.training.setup import open_run
from unipar.training.training_run import TrainingRun


class Line(unipar.Task):
    """y = 2 x, learned."""

    @override
    def model(self) -> Any:
        return nn.Linear(1, 1, bias=False)

    @override
    def data(self) -> Any:
        x = torch.arange(1.0, 11.0)[:, None]
        return TensorDataset(x, 2 * x)

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return (model(x) - y).square().mean()

    @override
    def validation(self) -> Any:
        return self.data()


@contextmanager
def running(task: unipar.Task, folder: Path, **sections: Any) -> Generator[TrainingRun]:
    """A run of this process alone."""
    made: dict[str, Any] = {"backend": "single", "device": "cpu", "batch": {"total": 4, "micro": 2}}
    made |= {"train": {"steps": 3, "optimizer": {"name": "sgd", "lr": 1e-3}}, "log": {"every": 2}} | sections
    place = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")
    try:
        settled = settle(Config.model_validate(made), 1)
        backend = registry.find_backend(settled.strategy.backend)
        with open_run(settled, backend, task, place, folder, plan_recompute=plan_recompute) as run:
            yield run
    finally:
        assert not torch.distributed.is_initialized(), "a run left its world behind"
