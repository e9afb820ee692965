"""DeepSpeed's own Adam, as a user's JSON asks for it."""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import nn
from torch.optim import Optimizer
from unipar_deepspeed import backend as deepspeed_backend
from unipar_deepspeed.engine import ZeroEngine

from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World


def deepspeed_adam(part: Part, config: Config, world: World) -> Engine:
    """Return DeepSpeed's engine over the optimizer that it makes of {"type": "Adam"}."""

    def start(model: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> Any:
        defaults = optimizer.defaults
        params = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay")} | {"torch_adam": True}
        groups: Any = [
            {"params": group["params"], "lr": group["lr"], "weight_decay": group["weight_decay"]}
            for group in optimizer.param_groups
        ]
        asked = settings | {"optimizer": {"type": "Adam", "params": params}}
        return deepspeed.initialize(model=model, model_parameters=groups, config=asked, dist_init_required=False)[0]

    open_deepspeed(world)
    return ZeroEngine(part, config, world, deepspeed_backend, start)


def open_deepspeed(world: World) -> None:
    """Let DeepSpeed take the world that there is."""
    world.set_variables(LOCAL_RANK=world.local_rank_for_libraries)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
