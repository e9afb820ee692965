"""Engine of Accelerate over FSDP2: Accelerate shards the model; the rest is as in the native FSDP2 engine."""

from __future__ import annotations

from math import inf
from typing import Any, final

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from unipar.backend import Part
from unipar.backend import offered_strategies as strategies
from unipar.config import Config
from unipar.config.sections import optimizer as sections
from unipar.distributed.world import World
from unipar.engines.fsdp2_sharded import ShardedEngine
from unipar.engines.placement import broadcast_model, cast_buffers, refuse_scalar_parameters, refuse_shared_parameters
from unipar_accelerate import accelerate_precision, fsdp_plugin_settings
from unipar_accelerate.engine import force_distributed_type, hide_launch_variables, reset_accelerate_state


@final
class AccelerateFSDP2Engine(ShardedEngine):
    """Engine whose model and optimizer Accelerate shards by FSDP2."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        refuse_scalar_parameters(part.module, str(strategies.strategy_of(config)))
        refuse_shared_parameters(part, str(strategies.strategy_of(config)))
        broadcast_model(part.module, world.device)  # whole on every rank: Accelerate shards only a complete model
        super().__init__(part, config, world)
        self.divisor = float(world.size)
        reset_accelerate_state()
        with hide_launch_variables():
            self.accelerator = start_fsdp2(part, config, world.device)
            world.require_same_world(
                "Accelerate", rank=self.accelerator.process_index, size=self.accelerator.num_processes
            )
            self.wrapped, self.optimizer = self.accelerator.prepare(self.call, self.base)
        if config.train.precision == "bf16-master":
            cast_buffers(part.module, torch.bfloat16)
        self.trained = tuple(p for g in self.base.param_groups for p in g["params"])
        self.kept = dict(part.module.named_parameters())
        allow_sharded_sgd(self.base, config)

    @override
    def norm(self) -> Tensor:
        if self.limit == inf:
            return super().norm()
        norm: Any = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def start_fsdp2(part: Part, config: Config, device: torch.device) -> Any:
    """Return an Accelerator with its FSDP2 plugin."""
    plugin = fsdp2_plugin(part, config)
    if device.type != "cpu":
        return Accelerator(mixed_precision=accelerate_precision(config), fsdp_plugin=plugin)
    accelerator: Any = Accelerator(cpu=True, mixed_precision=accelerate_precision(config))
    accelerator.state.fsdp_plugin = plugin
    force_distributed_type(accelerator, DistributedType.FSDP)
    return accelerator


def fsdp2_plugin(part: Part, config: Config) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's plugin for FSDP2, which splits the classes of the model's blocks."""
    settings = fsdp_plugin_settings(config)
    if bf16 := settings["mixed_precision_policy"]:
        dtypes = {name: getattr(torch, dtype) for name, dtype in bf16.items()}
        settings["mixed_precision_policy"] = MixedPrecisionPolicy(**dtypes)
    if part.blocks:
        classes = {type(part.module.get_submodule(name)).__name__ for name in part.blocks}
        settings["transformer_cls_names_to_wrap"] = sorted(classes)
    else:
        settings["auto_wrap_policy"] = "no_wrap"
    return FullyShardedDataParallelPlugin(**settings)


def allow_sharded_sgd(optimizer: Optimizer, config: Config) -> None:
    """Leave SGD's kernel open where the config does: PyTorch has no fused one for sharded parameters."""
    settings = config.train.optimizer
    if isinstance(optimizer, SGD) and isinstance(settings, sections.SGD) and settings.fused == "auto":
        for group in optimizer.param_groups:
            group["fused"] = None
