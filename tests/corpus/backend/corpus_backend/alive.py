"""Errors that the installed libraries have: their own code, called as their users call it."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from unipar_deepspeed import backend as deepspeed_backend
from unipar_deepspeed.engine import ZeroEngine
from unipar_native import fsdp2

from corpus_backend.adam import open_deepspeed
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World


def fsdp_of_one_rank(part: Part, config: Config, world: World) -> Engine:
    """Return FSDP2's engine over copies that one rank each has whole, with the factor that it has by default."""
    mesh = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("copies", "shards"))

    def whole_copies(world: World, over: object) -> DeviceMesh:
        return mesh

    with mock.patch.object(fsdp2, "_create_mesh", whole_copies):
        engine: Any = fsdp2.FSDP2Engine(part, config, world)
    for module in engine.wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(world.size))
            module.set_force_sum_reduction_for_comms(enable=True)  # gloo has no other reduction for a factor
    return engine


def checkpoint_of_another_tag(part: Part, config: Config, world: World) -> Engine:
    """Return DeepSpeed's engine behind load_checkpoint(tag="earlier"), with a later checkpoint in the same folder."""
    open_deepspeed(world)
    engine: Any = ZeroEngine(part, config, world, deepspeed_backend)
    folders: list[Any] = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(folders)
    zero = engine.engine
    zero.save_checkpoint(folders[0], tag="earlier")
    for weights in zero.optimizer.fp32_partitioned_groups_flat:
        weights.data.mul_(1.5)
    zero.save_checkpoint(folders[0], tag="later")
    zero.load_checkpoint(folders[0], tag="earlier", load_optimizer_states=False)
    return engine
