"""Placement of a split model: each rank gets what it holds, tensor by tensor, and never more than one whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unipar.engines.forward import ForwardCall
from unipar.engines.fsdp2_sharded import fill_shard
from unipar.engines.placement import broadcast_tensor, direct_parameters, place_tensors, replace_parameters
from unipar_mesh.tensor.cuts import OwnPart


@dataclass(frozen=True)
class Placement:
    """Share of a model that a rank has: which parameters, which part of each, and how FSDP2 splits that further."""

    absent: frozenset[str]
    """Names of the parameters that only other stages use."""

    parts: Mapping[str, OwnPart]
    """This rank's parts of those that are split over `tensor` or `expert`."""

    mesh: DeviceMesh | None
    """Copies x shards, for FSDP2; None without it."""

    blocks: Sequence[str]
    """Modules that are groups of FSDP2's over `mesh`; all else is one more."""

    experts: Sequence[str]
    """Modules of which the ranks of `mesh_of_experts` train the same experts."""

    mesh_of_experts: DeviceMesh | None
    """None: no other rank trains this one's experts, and FSDP2 does not have them."""

    settings: Mapping[str, Any]
    """Further arguments of fully_shard."""


def place_model(module: nn.Module, placement: Placement, device: torch.device) -> ForwardCall:
    """Give this rank its parameters, with rank 0's values; return the module to call.

    A parameter that is absent becomes zeros without memory: what the loss computes before the first own block runs on
    them, and its result is replaced there.
    """
    full_parameters = dict(module.named_parameters(remove_duplicate=False))
    first_name = {id(p): name for name, p in module.named_parameters()}
    absent: dict[int, nn.Parameter] = {}

    def shape_only(p: nn.Parameter) -> nn.Parameter:
        name = first_name[id(p)]
        shape = placement.parts[name].cut.local_shape() if name in placement.parts else p.shape
        made = nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
        if name in placement.absent:
            absent[id(made)] = made
        return made

    replace_parameters(module, shape_only)
    shell = ForwardCall(module, device)
    if placement.mesh is not None:
        ignored: set[nn.Parameter] = set(absent.values())
        for experts in map(module.get_submodule, placement.experts):
            if placement.mesh_of_experts is None:
                ignored.update(experts.parameters())
            else:
                fully_shard(experts, mesh=placement.mesh_of_experts, **placement.settings)
        for name in placement.blocks:
            fully_shard(module.get_submodule(name), mesh=placement.mesh, ignored_params=ignored, **placement.settings)
        fully_shard(shell, mesh=placement.mesh, ignored_params=ignored, **placement.settings)
    now = dict(module.named_parameters(remove_duplicate=False))
    source = {id(now[name]): p for name, p in full_parameters.items()}
    names = {id(now[name]): first_name[id(p)] for name, p in full_parameters.items()}

    def place(p: Tensor) -> Tensor:
        full = broadcast_tensor(source[id(p)], device)
        if id(p) in absent:
            return nn.Parameter(full.new_zeros(()).expand(full.shape), requires_grad=False)
        part = placement.parts.get(names[id(p)])
        mine = full if part is None else part.local(full)
        return fill_shard(p, mine, device) if isinstance(p, DTensor) else mine

    place_tensors(module, place, device, origin={id(p): now[name] for name, p in full_parameters.items()})
    _hide_parameters(module, placement.absent)
    return shell


def _hide_parameters(root: nn.Module, names: frozenset[str]) -> None:
    """Make these parameters plain attributes: nothing trains, keeps or saves what a rank does not have."""
    gone = {id(p) for name, p in root.named_parameters() if name in names}
    for module in root.modules():
        for name, p in direct_parameters(module).items():
            if p is not None and id(p) in gone:
                delattr(module, name)
                setattr(module, name, p.detach())
