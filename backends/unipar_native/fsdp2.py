"""Engine of FSDP2: parameters, gradients and optimizer states are DTensors, sharded along their first dimension."""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unipar.backend import Part
from unipar.backend.file_values import file_values
from unipar.config import Config
from unipar.distributed.copies_by_machine import copies_by_machine
from unipar.distributed.world import World
from unipar.engines.forward import ForwardCall
from unipar.engines.fsdp2_sharded import ShardedEngine, fill_shard, read_shard
from unipar.engines.placement import (
    broadcast_tensor,
    cast_buffers,
    place_tensors,
    refuse_scalar_parameters,
    refuse_shared_parameters,
    replace_parameters,
)


@final
class FSDP2Engine(ShardedEngine):
    """Engine that shards the model by FSDP2 itself."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        shard = config.parallel.shard
        refuse_scalar_parameters(part.module, f"native/{shard}")
        refuse_shared_parameters(part, f"native/{shard}")
        self.once = shard == "optimizer"
        mixed = config.train.precision == "bf16-master"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": shard == "parameters"}
        if config.model.offloaded_state == "parameters":
            settings["offload_policy"] = CPUOffloadPolicy()
        mesh = _create_mesh(world, config.parallel.shard_over)
        shell = _shard_model(part, world, mesh, settings)
        if mixed:
            cast_buffers(part.module, torch.bfloat16)
        super().__init__(part, config, world)
        # fully_shard() wrapped the shell as root, so the shell is the module to call
        shell.autocast, shell.cast = self.call.autocast, self.call.cast
        self.call = self.wrapped = shell
        self.divisor = float(world.size)
        self.copies = world.size // mesh.size(mesh.ndim - 1)


def _create_mesh(world: World, over: int | Literal["machine"] | None) -> DeviceMesh:
    """Return a mesh of all ranks, or a 2-D mesh whose rows of ranks shard one copy of the model each.

    Rows are neighbours, `over` of them, or the ranks of each machine, wherever these are.
    """
    names = ("copies", "shards")
    if over == "machine" and (rows := copies_by_machine(world.mesh, world.machines).rows)[1:]:
        return DeviceMesh(world.device.type, torch.tensor(rows), mesh_dim_names=names)
    if over in (None, "machine", world.size):
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(world.device.type, (world.size // over, over), mesh_dim_names=names)


def _shard_model(part: Part, world: World, mesh: DeviceMesh, settings: dict[str, Any]) -> ForwardCall:
    """Shard the model on the meta device, then fill the shards tensor by tensor.

    So a rank that did not create the model never holds more than one whole tensor.
    """
    module, device = part.module, world.device
    full_parameters = dict(module.named_parameters(remove_duplicate=False))
    replace_parameters(module, lambda p: nn.Parameter(p.detach().to("meta"), p.requires_grad))
    shell = ForwardCall(module, device)
    for name in part.blocks:
        fully_shard(module.get_submodule(name), mesh=mesh, **settings)
    fully_shard(shell, mesh=mesh, **settings)
    home = torch.device("cpu") if "offload_policy" in settings else device
    source = {id(p): full_parameters[n] for n, p in module.named_parameters(remove_duplicate=False)}

    def place(p: Tensor) -> Tensor:
        assert isinstance(p, DTensor)
        if (values := file_values(source[id(p)])) is not None:
            return read_shard(p, values, home)
        return fill_shard(p, broadcast_tensor(source[id(p)], device), home)

    now = dict(module.named_parameters(remove_duplicate=False))
    place_tensors(module, place, device, origin={id(p): now[n] for n, p in full_parameters.items()})
    return shell
