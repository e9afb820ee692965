"""Accelerate over DeepSpeed: it starts DeepSpeed's engine; from there on it is DeepSpeed's own."""

from __future__ import annotations

from typing import Any, final

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override
from unipar_deepspeed import backend as deepspeed
from unipar_deepspeed.engine import Zero

from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar_accelerate import mixed
from unipar_accelerate.engine import alone, bound, forget, take_over


def join(config: Config, place: Place) -> World:
    """DeepSpeed's way, then Accelerate on top."""
    return take_over(deepspeed.join(config, place))


def through(part: Part, config: Config, world: World) -> Engine:
    """DeepSpeed's engine, made by Accelerate from DeepSpeed's own settings."""

    def start(model: nn.Module, optimizer: Optimizer, told: dict[str, Any]) -> Any:
        forget()
        with alone():
            plugin = Plugin(hf_ds_config=told)
            accelerator = _made(plugin, config, world)
            world.agreed("Accelerate", rank=accelerator.process_index, size=accelerator.num_processes)
            return accelerator.prepare(model, optimizer)[0]

    return Zero(part, config, world, deepspeed, start)


def _made(plugin: Plugin, config: Config, world: World) -> Any:
    cpu = world.device.type == "cpu"
    accelerator: Any = Accelerator(cpu=cpu, deepspeed_plugin=plugin, mixed_precision=mixed(config))
    if cpu:
        plugin.set_mixed_precision(mixed(config))
        plugin.select(_from_accelerator_state=True)
        accelerator.state.deepspeed_plugins = plugin
        bound(accelerator, DistributedType.DEEPSPEED)
    return accelerator


@final
class Plugin(DeepSpeedPlugin):
    @override
    def set_deepspeed_weakref(self) -> None:
        """The original is for models of transformers, and imports it."""
