"""One process without a wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from typing_extensions import override

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import arrive
from unipar.engines.wrapper import Open

_NOTHING = nullcontext()


@final
class One(Open):
    """One process without a wrapper."""

    divisor = 1.0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        arrive(part.module, world.device)
        super().__init__(part, config, world)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return _NOTHING
