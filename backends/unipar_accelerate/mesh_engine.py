"""Engine of Accelerate's ParallelismConfig: its mesh and FSDP2, under models whose blocks unipar has split."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn
from typing_extensions import override
from unipar_mesh.engine import MeshEngine
from unipar_mesh.options import MeshOptions
from unipar_mesh.placement_of_parts import Placement

from unipar.backend import Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar_accelerate import parallelism_settings, refuse_sizes
from unipar_accelerate.engine import force_distributed_type, hide_launch_variables, reset_accelerate_state
from unipar_accelerate.fsdp2_engine import allow_sharded_sgd, fsdp2_plugin

_AXES = {"tensor": "tp", "context": "cp"}
"""Accelerate's names of dimensions of its mesh."""


@final
class AccelerateMeshEngine(MeshEngine):
    """Engine whose blocks are split as native's are, in groups of Accelerate's mesh, and sharded by its FSDP2."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        self.accelerator: Any = None
        for reason in refuse_sizes(config, world.data_size):  # with data: auto they are not known before
            raise TaskError(reason)
        super().__init__(part, config, world, MeshOptions())

    @override
    def placement(self, config: Config, world: World) -> Placement:
        return replace(super().placement(config, world), mesh=None)  # Accelerate shards what is there

    @override
    def wrap(self, part: Part, config: Config) -> None:
        reset_accelerate_state()
        shell: Any = self.call
        with hide_launch_variables():
            self.accelerator = _start(part, config, self.world)
            self.world.require_same_world(
                "Accelerate", rank=self.accelerator.process_index, size=self.accelerator.num_processes
            )
            shell.tp_size = self.axes.tensor  # by which Accelerate knows that a model is split already
            with _no_words_on_plain_parameters():
                _, self.optimizer = self.accelerator.prepare(shell, self.base)
        _restore_masks(shell)
        self.trained = tuple(p for g in self.base.param_groups for p in g["params"])
        self.kept = dict(part.module.named_parameters())
        allow_sharded_sgd(self.base, config)
        mesh = self.accelerator.torch_device_mesh
        for axis, name in {**_AXES, "data": "dp_shard_cp"}.items():
            if axis == "data" and config.parallel.shard == "nothing":
                continue
            if axis == "data" or self.axes.sizes.get(axis, 1) > 1:
                self.world.groups.axis_of_group[mesh[name].get_group().group_name] = axis

    @override
    def group(self, axis: str) -> dist.ProcessGroup:
        return self.accelerator.torch_device_mesh[_AXES[axis]].get_group()


def _start(part: Part, config: Config, world: World) -> Any:
    """Return an Accelerator with a ParallelismConfig: on the CPU it would drop its plugin, and refuse the config."""
    parallelism = ParallelismConfig(**parallelism_settings(config, world.data_size))
    plugin = None if config.parallel.shard == "nothing" else fsdp2_plugin(part, config)
    if world.device.type != "cpu":
        return Accelerator(mixed_precision="no", fsdp_plugin=plugin, parallelism_config=parallelism)
    accelerator: Any = Accelerator(cpu=True, mixed_precision="no")
    state = accelerator.state
    state.parallelism_config, state.device_mesh = parallelism, parallelism.get_device_mesh("cpu")
    if plugin is not None:
        state.fsdp_plugin = plugin
        force_distributed_type(accelerator, DistributedType.FSDP)
        parallelism._validate_accelerator(accelerator)  # pyright: ignore[reportPrivateUsage]
    return accelerator


def _restore_masks(shell: nn.Module) -> None:
    """Take away hooks that drop attention masks: the attention of split sequences takes them here."""
    for name, module in shell.named_modules():
        if name.endswith("self_attn"):
            hooks: Any = module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
            for key in [k for k, hook in hooks.items() if hook.__name__ == "_self_attn_pre_forward_hook"]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _no_words_on_plain_parameters() -> Generator[None]:
    """Context manager: Accelerate would warn that no parameter is a DTensor, so that it splits none itself."""
    logger = logging.getLogger("accelerate.accelerator")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
