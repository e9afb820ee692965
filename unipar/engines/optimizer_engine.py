"""`OptimizerEngine`: base class of engines with one optimizer of torch, a limit of the norm and a loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, final

import torch
from torch.optim import Optimizer
from typing_extensions import override

from unipar.backend import Engine, Fn, Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.engines.learning_rate import current_rates
from unipar.engines.loss_scale import LossScaler
from unipar.engines.state import broadcast_module_buffers


class OptimizerEngine(Engine):
    """Engine of one part whose groups, learning rates and loss scale are saved and put back by their own names."""

    call: ForwardCall
    """Module that calls a function of the model as the config's precision asks; no library wraps it."""

    base: Optimizer
    """Optimizer whose groups are the user's."""

    scaler: LossScaler | None
    """Loss scale of fp16; None in other precisions."""

    scales_on_host = False
    """Whether the library takes the loss scale as a number, so that it is kept in host memory."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        self.world, self.model, self.config = world, part.module, config
        clip = config.train.clipping
        self.limit = inf if clip is None else float(clip.max)
        self.fp64 = clip is not None and clip.norm == "fp64"
        place = torch.device("cpu") if self.scales_on_host else world.device
        self.scaler = LossScaler(place) if config.train.precision == "fp16" else None

    @override
    def counters(self) -> dict[str, float]:
        return {} if self.scaler is None else self.scaler.counters()

    @override
    def restore_counters(self, saved: Mapping[str, float]) -> None:
        if self.scaler is not None and saved:
            self.scaler.restore_counters(saved)

    @override
    def optimizer_groups(self) -> Sequence[dict[str, Any]]:
        return self.base.param_groups

    @override
    @final
    def call_frozen(self, fn: Fn, inputs: Any) -> Any:
        # not through what the library wraps: hooks gather split parameters in it, and it reduces no gradients
        return self.call(fn, OpaqueBatch(inputs))

    @override
    def share_buffers(self) -> None:
        broadcast_module_buffers(self.model)

    @override
    def learning_rates(self) -> list[float]:
        return current_rates(self.base)
