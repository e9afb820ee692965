"""Engine of one process without a wrapper."""

from __future__ import annotations

from functools import partial
from typing import final

from torch import Tensor
from typing_extensions import override

from unipar.backend import LossFn, Micro, Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model, broadcast_tensor, place_tensors
from unipar.engines.wrapper import WrapperEngine
from unipar.model.create import device_in_place, devices_by_hand


@final
class SingleEngine(WrapperEngine):
    """Engine of one process, without a wrapper; a model that its author has spread over devices stays where it is."""

    divisor = 1.0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        self._by_hand = bool(devices_by_hand(part.module, world.device))
        if self._by_hand:
            stays = partial(device_in_place, device=world.device)
            place_tensors(part.module, lambda p: broadcast_tensor(p, stays(p)), stays)
        else:
            broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self._is_bare = self.call.autocast is self.call.cast is None and not self._by_hand
        """Whether the forward of a microbatch is nothing but the loss."""

    @override
    def forward_loss(self, fn: LossFn, micro: Micro) -> Tensor:
        if self._is_bare:
            return fn(self.model, micro.batch, micro.number)
        loss = super().forward_loss(fn, micro)
        return loss.to(self.world.device) if self._by_hand else loss  # it is where the author has put the last part

    @override
    def sync(self, micros: int, *, last: bool) -> None:
        """Return no context, as nothing is reduced: there is one process."""
