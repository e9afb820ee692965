"""Errors in the rate and in what the optimizer does."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override
from unipar_accelerate.engine import AccelerateDDPEngine, hand_world_to_accelerate

from corpus_backend.healthy import HealthyDDP
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World


def rate_ahead(part: Part, config: Config, world: World) -> Engine:
    """Return Accelerate's own engine whose rate comes from Accelerate's own scheduler, as it is installed."""
    train = config.train
    assert train.steps is not None
    steps = train.steps
    engine: Any = AccelerateDDPEngine(part, config, hand_world_to_accelerate(world))
    engine.settle(find_unused=False)
    unit = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = engine.accelerator.prepare_scheduler(
        LambdaLR(unit, lambda step: train.schedule.factor(step, steps)),
    )
    update = engine.update

    def update_and_move_schedule() -> None:
        engine.rates.set(engine.optimizer, scheduler.get_last_lr()[0])
        update()
        scheduler.step()

    engine.update = update_and_move_schedule
    return engine


@final
class OldParameters(HealthyDDP):
    """The optimizer was made before the library replaced the parameters, and steps those that nobody uses."""

    @override
    def update(self) -> None:
        groups = self.base.param_groups
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        self.base.step()
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
        self.base.zero_grad()


@final
class SomeOldParameters(HealthyDDP):
    """The optimizer holds parameters of the first block that the library has replaced since."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.first = {id(p) for p in part.module.get_submodule(part.blocks[0]).parameters()}

    @override
    def update(self) -> None:
        groups = self.base.param_groups
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in self.first]
        self.base.step()
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
        self.base.zero_grad()
