"""Task that says how many bytes a rank sends in one step, and how many of them between machines."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn
from typing_extensions import override

import unipar
from tests.support.tiny import Tiny
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter, Traffic
from unipar.training.training_run import TrainingRun

COUNTED = 4


class Counted(Tiny):
    """Blocks with whole numbers of rows for up to eight ranks."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    @override
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return ((model(x) - y) ** 2).mean()

    @override
    def train(self, run: unipar.Run) -> None:
        assert isinstance(run, TrainingRun)
        traffic: Traffic = Counter()
        world = run.world
        counter = CollectiveCounter(traffic, world.mesh, world.machines)
        for number, local_batch in enumerate(run.batches(), 1):
            if number != COUNTED:
                run.step(local_batch)
                continue
            with counter:
                run.step(local_batch)
            print(f"rank {run.rank} on {world.machines.of(run.rank).name}: {traffic.total()}, {counter.across} across")
