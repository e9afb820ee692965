"""Errors in the rate and in what the optimizer does."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override
from unipar_accelerate.engine import AccelerateDDPEngine, hand_world_to_accelerate

from tests.support.healthy_engines import HealthyByHand, HealthyDDP
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World


def rate_ahead(part: Part, config: Config, world: World) -> Engine:
    """Return Accelerate's own engine whose rate comes from Accelerate's own scheduler, as it is installed."""
    train = config.train
    assert train.steps is not None
    steps = train.steps
    engine: Any = AccelerateDDPEngine(part, config, hand_world_to_accelerate(world))
    engine.settle(find_unused_parameters=False)
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


@final
class DecayEverything(HealthyDDP):
    """A refactoring has lost the exemption of norms and biases from weight decay."""

    @override
    def update(self) -> None:
        kept = [group["weight_decay"] for group in self.base.param_groups]
        for group in self.base.param_groups:
            group["weight_decay"] = max(kept)
        super().update()
        for group, decay in zip(self.base.param_groups, kept, strict=True):
            group["weight_decay"] = decay


@final
class Bf16Weights(HealthyDDP):
    """Weights that were to be kept in fp32 are numbers of bf16 after every step."""

    @override
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for p in self.trained:
                p.copy_(p.to(torch.bfloat16))


@final
class OwnStart(HealthyDDP):
    """Each rank keeps the weights that its own seed gave it: nothing is broadcast."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        if world.rank:
            generator = torch.Generator().manual_seed(world.rank)
            with torch.no_grad():
                for p in self.trained:
                    p.add_(torch.randn(p.shape, generator=generator).to(p.device), alpha=0.02)


class MadeStates(HealthyDDP):
    """Base of engines whose optimizer has made its states before training, by a step that changes nothing else."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        kept = [(group["lr"], group["weight_decay"]) for group in self.base.param_groups]
        for group in self.base.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        for p in self.trained:
            p.grad = torch.zeros_like(p)
        self.base.step()
        self.base.zero_grad()
        for group, (rate, decay) in zip(self.base.param_groups, kept, strict=True):
            group["lr"], group["weight_decay"] = rate, decay


@final
class StepAhead(MadeStates):
    """That step counts: the first one of training is corrected for bias like the second one."""


@final
class Uncorrected(MadeStates):
    """Nothing is corrected for bias, as by an optimizer that never counts."""

    @override
    def update(self) -> None:
        counts: list[Tensor] = [self.base.state[p]["step"] for p in self.trained]
        kept = [count.clone() for count in counts]
        for count in counts:
            count.fill_(1e6)
        super().update()
        for count, before in zip(counts, kept, strict=True):
            count.copy_(before)


@final
class MuonAsSGD(HealthyDDP):
    """The library leaves the orthogonalization to a wrapper that this configuration does not have."""

    @override
    def update(self) -> None:
        with torch.no_grad():
            for group in self.base.param_groups:
                for p in group["params"]:
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=group["lr"])
        self.base.zero_grad()


@final
class MuonOfPart(HealthyByHand):
    """Each rank has the reduced gradient of its half of a matrix, and orthogonalizes the whole matrix with it."""

    @override
    def norm(self) -> Tensor:
        whole = [p.grad.clone() for p in self.trained if p.grad is not None]
        norm = super().norm()
        for p, own, reduced in zip(self.trained, self.own, whole, strict=True):
            assert p.grad is not None
            p.grad.copy_(own)
            _half(p.grad, self.world).copy_(_half(reduced, self.world))
        return norm

    @override
    def finish_reduction(self) -> None:
        self.own = [p.grad.clone() for p in self.trained if p.grad is not None]
        super().finish_reduction()

    @override
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for p in self.trained:
                kept = torch.zeros_like(p)
                _half(kept, self.world).copy_(_half(p, self.world))
                p.copy_(self.world.sum(kept))


def _half(tensor: Tensor, world: World) -> Tensor:
    return tensor.view(-1).chunk(world.size)[world.rank]
