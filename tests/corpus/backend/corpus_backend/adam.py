"""DeepSpeed's own Adam, as a user's JSON asks for it."""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import nn
from torch.optim import Optimizer
from unipar_deepspeed import backend as deepspeed_backend
from unipar_deepspeed.engine import ZeroEngine, start_deepspeed

from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World


def deepspeed_adam(part: Part, config: Config, world: World) -> Engine:
    """Return DeepSpeed's engine over the optimizer that it makes of {"type": "Adam"}."""

    def start(model: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> Any:
        defaults = optimizer.defaults
        params = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay")} | {"torch_adam": True}
        groups = [
            {"params": group["params"], "lr": group["lr"], "weight_decay": group["weight_decay"]}
            for group in optimizer.param_groups
        ]
        asked = settings | {"optimizer": {"type": "Adam", "params": params}}
        return deepspeed.initialize(model=model, model_parameters=groups, config=asked, dist_init_required=False)[0]

    start_deepspeed(world)
    return ZeroEngine(part, config, world, deepspeed_backend, start)
