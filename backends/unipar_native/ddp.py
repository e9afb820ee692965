"""DistributedDataParallel, with a whole optimizer or its states split; and what all have in common that wrap so."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from unipar.backend import Part
from unipar.birth import arrive
from unipar.config import Config
from unipar.errors import TaskError
from unipar.open import Open
from unipar.world import World
from unipar_native import ZERO_SETTINGS, ddp_settings, options_of


class FirstByHand(Open):
    """For wrappers that must know in advance whether the loss leaves parameters unused.

    The first step runs without the wrapper, its gradients are reduced here, and it shows which parameters
    the loss uses; then the library wraps the model with the right setting.
    """

    find_unused: bool | None = None
    """None until the first step has shown it."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        arrive(part.module, world.device)
        super().__init__(part, config, world)
        self.backend = config.backend
        self.names = {id(p): n for n, p in part.module.named_parameters()}
        self.divisor = float(world.size)

    @abstractmethod
    def wrap(self, *, find_unused: bool) -> nn.Module: ...

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]: ...

    @override
    @final
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.find_unused is None else self.no_sync()

    @override
    @final
    def reduced(self) -> None:
        if self.find_unused is None:
            self._reduce_by_hand()
        elif not self.find_unused:
            unused = next((p for p in self.trained if p.grad is None), None)
            if unused is not None:
                raise TaskError(
                    f"the loss does not use the parameter {self.names[id(unused)]!r} in this step, though it used all "
                    f"in the first: set options.{self.backend}.find_unused: true, or use it times 0.0"
                )

    def _reduce_by_hand(self) -> None:
        used = torch.tensor([p.grad is not None for p in self.trained], dtype=torch.float32, device=self.world.device)
        self.world.sum(used)
        for p, ranks in zip(self.trained, used.tolist(), strict=True):
            if ranks:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = self.world.sum(grad.div_(self.world.size))
        self._unused = bool((used < self.world.size).any())

    @override
    @final
    def update(self) -> None:
        super().update()
        if self.find_unused is None:
            self.settle(find_unused=self._unused)

    @final
    def settle(self, *, find_unused: bool) -> None:
        self.find_unused = find_unused
        self.wrapped = self.wrap(find_unused=find_unused)


@final
class DDP(FirstByHand):
    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        options = options_of(config)
        self.settings = ddp_settings(options)
        if config.parallel.shard == "optimizer":
            self.optimizer, self.apart = shared_out(self.base), True
        if options.find_unused != "auto":
            self.settle(find_unused=options.find_unused)

    @override
    def wrap(self, *, find_unused: bool) -> nn.Module:
        settings: dict[str, Any] = self.settings | {"find_unused_parameters": find_unused}
        self.ddp = DistributedDataParallel(self.call, **settings)
        self.ddp.broadcast_buffers = False  # running statistics are shared before they are used, as in every cell
        return self.ddp

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()


def shared_out(whole: Optimizer) -> ZeroRedundancyOptimizer:
    """Each rank steps some of the parameters with what is left of `whole`, and sends them to all."""
    dtypes = sorted({str(p.dtype) for group in whole.param_groups for p in group["params"]})
    if len(dtypes) > 1:
        raise TaskError(
            f"native/optimizer cannot hold parameters of {' and '.join(dtypes)} together, as ZeroRedundancyOptimizer "
            "takes one dtype: give all the same, or set parallel.shard: nothing"
        )

    def mine(groups: list[dict[str, Any]]) -> Optimizer:
        """The optimizer itself, whatever its class, less the parameters of other ranks."""
        for group, own in zip(whole.param_groups, groups, strict=True):
            group["params"] = own["params"]
        kept = {p for group in groups for p in group["params"]}
        for p in set(whole.state) - kept:
            del whole.state[p]
        return whole

    groups = [dict(group) for group in whole.param_groups]
    make: Any = mine  # annotated as a class; any callable will do
    return ZeroRedundancyOptimizer(groups, make, **ZERO_SETTINGS)
