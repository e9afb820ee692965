"""Engine of one process without a wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from typing_extensions import override

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine

_NULL_CONTEXT = nullcontext()


@final
class SingleEngine(WrapperEngine):
    """Engine of one process, without a wrapper."""

    divisor = 1.0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return _NULL_CONTEXT
