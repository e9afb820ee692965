"""Engines in which nothing is wrong, for backends with errors: DDP as anybody writes it, gradients added by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine


class HealthyDDP(WrapperEngine):
    """DDP, which takes the mean over ranks in the last microbatch's backward."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self.config, self.divisor = config, float(world.size)
        self.ddp: Any = DistributedDataParallel(
            self.call, init_sync=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )
        self.wrapped = self.ddp

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


class HealthyByHand(HealthyDDP):
    """Gradients that each rank keeps for itself until `average`."""

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()

    @override
    def finish_reduction(self) -> None:
        self.average()

    def average(self) -> None:
        """Take the mean over ranks."""
        for p in self.trained:
            if p.grad is not None:
                self.world.sum(p.grad.div_(self.world.size))
