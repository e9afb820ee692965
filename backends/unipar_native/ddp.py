"""Engine of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.late_wrapped import LateWrappedEngine
from unipar_native import ddp_settings, options_of
from unipar_native.ddp_hooks import HALF_DTYPES, held_by, register_hook


@final
class DDPEngine(LateWrappedEngine):
    """Engine under DDP, with the whole optimizer on every rank or with its states sharded."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.hook_state: Any = None
        self.options = options = options_of(config)
        self.settings = ddp_settings(options)
        self.sent_dtype = HALF_DTYPES.get(options.hook)
        if config.parallel.shard == "optimizer":
            # imported here: it costs 6 MB and 0.2 s, and plain DDP does not need it
            from unipar_native.zero_optimizer import split_optimizer

            self.optimizer, self.splits_states_by_tensor = split_optimizer(self.base), True
        if options.find_unused_parameters != "auto":
            self.settle(find_unused_parameters=options.find_unused_parameters)

    @override
    def wrap(self, *, find_unused_parameters: bool) -> nn.Module:
        settings: dict[str, Any] = self.settings | {"find_unused_parameters": find_unused_parameters}
        self.ddp = DistributedDataParallel(self.call, **settings)
        self.hook_state = register_hook(self.ddp, self.options)
        self.syncs_each = self.options.static_graph  # its first backward must reduce, or DDP fails an assertion
        self.ddp.broadcast_buffers = False  # unipar itself shares running statistics before they are used
        return self.ddp

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()

    @override
    def held_by_hook(self) -> Iterable[tuple[str, Tensor]]:
        return held_by(self.hook_state)
