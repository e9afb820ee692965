"""Twenty lines make an engine of a library that leaves gradients in the open."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from typing_extensions import override

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine


@final
class ByHand(WrapperEngine):
    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        # ranks along a further axis do the same work here, and their gradients are added as well
        self.divisor = world.data_size / world.size

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def finish_reduction(self) -> None:
        for p in self.trained:
            p.grad = self.world.sum(torch.zeros_like(p) if p.grad is None else p.grad)
