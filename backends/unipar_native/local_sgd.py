"""Engine of local SGD: each rank steps by itself, and every train.local_steps steps all ranks average their states."""

from __future__ import annotations

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
    """Engine without a wrapper, whose ranks step by themselves.

    A rank's gradient is that of its share of the batch, times the number of ranks: with plain SGD, averaging after
    every step gives the step of the whole batch.
    """

    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self.divisor = float(world.size)

    @override
    def sync(self, micros: int, *, last: bool) -> None:
        """Return no context, as nothing is reduced: each rank steps by itself."""

    @override
    @torch.no_grad()
    def take_mean(self) -> None:
        """Average parameters and the optimizer's moments, so that all ranks have the same state."""
        state: Any = self.base.state
        for p in self.trained:
            for tensor in (p, *state.get(p, {}).values()):
                if isinstance(tensor, Tensor) and tensor.shape == p.shape:
                    self.world.sum(tensor.detach()).div_(self.world.size)
