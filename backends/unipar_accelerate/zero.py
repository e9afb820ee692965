"""Engine of Accelerate over DeepSpeed: Accelerate starts DeepSpeed's engine, which then trains by itself."""

from __future__ import annotations

from typing import Any, final

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override
from unipar_deepspeed import backend as deepspeed
from unipar_deepspeed.engine import ZeroEngine

from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar_accelerate import accelerate_precision
from unipar_accelerate.engine import (
    force_distributed_type,
    hand_world_to_accelerate,
    hide_launch_variables,
    reset_accelerate_state,
)


def join_over_deepspeed(config: Config, place: Place) -> World:
    """Create the process group and start DeepSpeed on it, then Accelerate."""
    return hand_world_to_accelerate(deepspeed.join(config, place))


def build_zero_engine(part: Part, config: Config, world: World) -> Engine:
    """Return the engine of the backend `deepspeed`, started by Accelerate with the same settings."""

    def start(model: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> Any:
        reset_accelerate_state()
        with hide_launch_variables():
            plugin = BareDeepSpeedPlugin(hf_ds_config=settings)
            accelerator = _create_accelerator(plugin, config, world)
            world.require_same_world("Accelerate", rank=accelerator.process_index, size=accelerator.num_processes)
            return accelerator.prepare(model, optimizer)[0]

    return ZeroEngine(part, config, world, deepspeed, start)


def _create_accelerator(plugin: BareDeepSpeedPlugin, config: Config, world: World) -> Any:
    cpu = world.device.type == "cpu"
    accelerator: Any = Accelerator(cpu=cpu, deepspeed_plugin=plugin, mixed_precision=accelerate_precision(config))
    if cpu:
        plugin.set_mixed_precision(accelerate_precision(config))
        plugin.select(_from_accelerator_state=True)
        accelerator.state.deepspeed_plugins = plugin
        force_distributed_type(accelerator, DistributedType.DEEPSPEED)
    return accelerator


@final
class BareDeepSpeedPlugin(DeepSpeedPlugin):
    """Plugin without the support for transformers."""

    @override
    def set_deepspeed_weakref(self) -> None:
        """Do nothing: the original imports transformers, and only its models need the reference."""
