"""The least task that trains, with some ways to go wrong."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

import unipar

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 8},
    "train": {"steps": 12, "optimizer": {"name": "sgd", "lr": 0.01}},
    "log": {"every": 5},
}


class Tiny(unipar.Task):
    """A line through 64 points."""

    def __init__(self, pause: float = 0.0, fails_on: int | None = None, hangs_on: int | None = None) -> None:
        self._pause, self._fails_on, self._hangs_on = pause, fails_on, hangs_on
        self._calls = 0

    @override
    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    @override
    def data(self) -> list[tuple[Tensor, Tensor]]:
        points = torch.linspace(-1, 1, 256).reshape(64, 4)
        return [(x, x.sum().reshape(1)) for x in points]

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self._pause)
        self._calls += 1
        if self._calls == 4 and torch.distributed.get_rank() == self._hangs_on:
            time.sleep(600)
        x, y = batch
        return ((model(x) - y) ** 2).mean()

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            if run.rank == self._fails_on:
                raise ValueError("this rank was told to fail")
            run.step(local_batch)
        print("trained", run.done)
