"""Errors in layers of experts, in which each rank trains on tokens of its own and experts see the tokens of all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.corpus.tasks import ExpertTexter
from tests.support.healthy_engines import HealthyByHand, HealthyDDP
from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World


@final
class ExpertsSummed(HealthyDDP):
    """Experts have the gradients of all ranks' tokens, and nothing divides by the ranks from which these come."""

    @override
    def finish_reduction(self) -> None:
        experts = experts_of(self.model)
        for p in (experts.up, experts.down):
            assert p.grad is not None
            p.grad.mul_(self.world.size)


@final
class RouterApart(HealthyByHand):
    """Each rank keeps its own gradient of the router."""

    @override
    def finish_reduction(self) -> None:
        weight = experts_of(self.model).router.weight
        assert weight.grad is not None
        own = weight.grad.clone()
        self.average()
        weight.grad.copy_(own)


@final
class NormOfOwnExperts(HealthyDDP):
    """The clip takes the mean of the ranks' norms, each of all dense gradients and of those of the rank's experts."""

    @override
    def norm(self) -> Tensor:
        experts = experts_of(self.model)
        stacked = {id(experts.up), id(experts.down)}
        own: list[Tensor] = []
        for p in self.trained:
            assert p.grad is not None
            own.append(p.grad.chunk(self.world.size)[self.world.rank] if id(p) in stacked else p.grad)
        norm = self.world.sum(torch.stack([grad.norm() for grad in own]).norm()) / self.world.size
        for p in self.trained:
            assert p.grad is not None
            p.grad.mul_((self.limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


class ScaledBalance(HealthyDDP):
    """Base of engines that scale the gradient of the loss that balances experts, and not that loss."""

    count = 1

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        experts_of(part.module).balance.register_forward_hook(self._scale)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        self.count = micros
        return super().sync(micros, last=last)

    def _scale(self, module: nn.Module, given: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._scaled)

    def _scaled(self, grad: Tensor) -> Tensor:
        return grad * self.scale()

    def scale(self) -> float:
        """Return the factor on the gradient."""
        raise NotImplementedError


@final
class BalanceTimesAccumulation(ScaledBalance):
    """The loss that balances experts is not divided by the number of microbatches, as the other one is."""

    @override
    def scale(self) -> float:
        return float(self.count)


@final
class BalanceLost(ScaledBalance):
    """The function that was to add the gradient is called, and what it returns is not used."""

    @override
    def scale(self) -> float:
        return 0.0


@final
class AbsentSlots(HealthyDDP):
    """The router gets a gradient for slots whose experts are on another rank: it is that of another expert's output."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        experts_of(part.module).weigh.register_forward_hook(_add_gradient)


def _add_gradient(module: nn.Module, given: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    outputs, weights = given
    nothing = weights - weights.detach()
    return out + (nothing[..., None] * outputs.detach().flip(-2)).sum(-2)


def experts_of(model: nn.Module) -> Any:
    """Return the layer of experts of the model."""
    assert isinstance(model, ExpertTexter)
    return model.experts
