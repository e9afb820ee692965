"""FSDP2: parameters, gradients and optimizer states are DTensors, split along their first dimension."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from unipar.backend import Part
from unipar.birth import lower, parameters_of, refuse_scalars, settle, travel
from unipar.call import Call
from unipar.config import Config
from unipar.errors import TaskError
from unipar.open import Open, clipped, span
from unipar.world import World

_REACHED_IN = (
    "the loss reads a parameter of a block outside that block's forward, where it is split: "
    "read it in the block's own forward, or set model.blocks: none"
)


class Sharded(Open):
    """What every FSDP2 has in common, whoever split the model."""

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # every microbatch is reduced and scattered: less memory than whole gradients

    @override
    def backward(self, loss: Tensor) -> None:
        if isinstance(loss, DTensor):
            raise TaskError(_REACHED_IN)
        loss.backward()

    @override
    def norm(self) -> Tensor:
        norm: Any = clipped(self.trained, self.limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # each rank's own otherwise

    @override
    def _local_grads(self) -> tuple[list[Tensor], bool]:
        return [span(p.grad)[2] for p in self.trained if p.grad is not None], True


@final
class FSDP2(Sharded):
    def __init__(self, part: Part, config: Config, world: World) -> None:
        refuse_scalars(part.module, "native/parameters")
        mixed = config.train.precision == "bf16-master"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        shell = _split(part, world, policy)
        if mixed:
            lower(part.module, torch.bfloat16)
        super().__init__(part, config, world)
        # the root that was split is the module that is called
        shell.autocast, shell.cast = self.call.autocast, self.call.cast
        self.call = self.wrapped = shell
        self.divisor = float(world.size)


def _split(part: Part, world: World, policy: MixedPrecisionPolicy) -> Call:
    """Split on meta, then fill chunk by chunk: never more than one whole tensor on a rank."""
    module, device = part.module, world.device
    whole = dict(module.named_parameters(remove_duplicate=False))
    _to_meta(module)
    shell = Call(module, device)
    mesh = init_device_mesh(device.type, (world.size,))
    for name in part.blocks:
        fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(shell, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    source = {id(p): whole[n] for n, p in module.named_parameters(remove_duplicate=False)}

    def place(p: Tensor) -> Tensor:
        full = travel(source[id(p)], device)
        assert isinstance(p, DTensor)
        local = torch.empty_like(p.to_local(), device=device)
        new = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
        local.view(-1).copy_(full.view(-1)[slice(*span(new)[1])])
        return new

    now = dict(module.named_parameters(remove_duplicate=False))
    settle(module, place, device, origin={id(p): now[n] for n, p in whole.items()})
    return shell


def _to_meta(root: nn.Module) -> None:
    """`module.to("meta")`, but tied parameters stay tied and buffers stay where they are."""
    done: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in parameters_of(module).items():
            if p is not None:
                if id(p) not in done:
                    done[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
                setattr(module, name, done[id(p)])
