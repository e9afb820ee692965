"""Local steps: each rank trains by itself, and now and then all take the mean of what they hold."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine


@final
class LocalSGDEngine(WrapperEngine):
    """No wrapper. A rank's gradient is that of its share of the batch, times the number of ranks: with plain SGD and a
    mean after every step this is the step of all."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self.divisor = float(world.size)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    @torch.no_grad()
    def take_mean(self) -> None:
        """Parameters and the optimizer's moments too, so that one rank's state is everybody's."""
        state: Any = self.base.state
        for p in self.trained:
            for held in (p, *state.get(p, {}).values()):
                if isinstance(held, Tensor) and held.shape == p.shape:
                    self.world.sum(held.detach()).div_(self.world.size)
