"""DeepSpeed's tensor parallelism (AutoTP) by a plan derived from the model, and proved before the first step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from unipar_mesh.look_at_model import WholeModel, look_at_model, whole_gradients
from unipar_mesh.model_split import made_on_first_rank
from unipar_mesh.proof.proof_of_model import refuse_difference, sketch_regions, trained_and_narrowest_dtypes
from unipar_mesh.refusal_sentences import refuse_empty_plans, refuse_part
from unipar_mesh.tensor.cuts import BlockPlan, ParameterCut
from unipar_mesh.tensor.tensor_model import CallsOfBlock, calls_of_blocks, cuts_of_model, plan_blocks
from unipar_mesh.tensor.tensor_parallel import arm_block
from unipar_mesh.trials_without_trace import kept_attributes

from unipar.backend import Part, Region
from unipar.backend.precision import batch_dtype
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.batch_transfer import cast_floats, to_device
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.errors import TaskError
from unipar.utils.seeding import kept_random_state
from unipar_deepspeed.autotp import matrices_left_whole

if TYPE_CHECKING:
    from unipar_deepspeed.expert_parallel import ExpertSplit

_NO_HEAD = ["(none)"]
"""Names of output heads, which DeepSpeed would cut in a way of its own: no layer has such a name."""


@final
@dataclass(frozen=True)
class TensorSplit:
    """Plan of a model's blocks over the ranks of `tensor`, the same on all ranks."""

    batch: Any
    """Sample on which the model was tried."""

    plans: Mapping[str, BlockPlan]
    """Plans by name of the block."""

    cuts: Mapping[str, ParameterCut]
    """Cuts by name of the parameter."""

    seat: int
    """This rank's place in `tensor`: which part it has."""

    calls: Mapping[str, CallsOfBlock] = field(default_factory=dict[str, CallsOfBlock])
    """Calls to rewrite, by name of the block; none: those of the plans, however blocks are called."""

    key: ClassVar[str] = "tensor_parallel"
    """DeepSpeed's section."""

    samples: ClassVar[int] = 1
    """Number of microbatches on which the model is tried."""

    @property
    def speaks_for_whole(self) -> bool:
        """Whether this rank counts its gradients of parameters that are not cut."""
        return self.seat == 0

    def saved_name(self, name: str) -> str:
        """Return the user's name of a parameter."""
        return name

    def numel(self, name: str, p: Tensor) -> int:
        """Return how many elements of a whole parameter one rank has."""
        return torch.Size(self.cuts[name].local_shape()).numel() if name in self.cuts else p.numel()

    def section(self, model_prefix: str) -> dict[str, Any]:
        """Return DeepSpeed's section `tensor_parallel`."""
        ranks = next(iter(self.plans.values())).ranks
        specs = [spec for block, plan in self.plans.items() for spec in _layer_specs(f"{model_prefix}{block}.", plan)]
        layers = {"use_default_specs": False, "lm_head_patterns": _NO_HEAD, "layer_specs": specs}
        return {"autotp_size": ranks, "partition_config": layers}

    def regions(self, name: str, start: int, length: int) -> Iterator[tuple[Region, Region]]:
        """Yield regions of the whole parameter that a range of this rank's part holds, and where in that range."""
        yield from regions_of_range(self.cuts[name], self.seat, start, length)


def _layer_specs(prefix: str, plan: BlockPlan) -> Iterator[dict[str, Any]]:
    for name, cut in plan.cuts.items():
        spec: dict[str, Any] = {"patterns": [re.escape(f"{prefix}{name}.weight") + "$"], "partition_type": cut.kind}
        if cut.groups > 1:
            spec |= {"shape": [list(cut.sizes) or cut.groups, -1], "partition_dim": 0}
        yield spec


def regions_of_range(cut: ParameterCut, seat: int, start: int, length: int) -> Iterator[tuple[Region, Region]]:
    """Yield regions of a whole parameter held by a range of one rank's part, each with its place in that range.

    The part is taken as a row of numbers, of which a rank of ZeRO may have any range.
    """
    inner = torch.Size(cut.shape[cut.dim + 1 :]).numel()
    row = cut.shape[cut.dim] * inner
    at, spans = 0, list[tuple[int, int, int]]()  # of a row: first element in the part, in the whole, length
    for first, size in cut.cut.spans(cut.shape[cut.dim], seat, cut.ranks):
        spans.append((at, first * inner, size * inner))
        at += size * inner
    width, stop = at, start + length
    while start < stop:
        number, begin = divmod(start, width)
        rows = (stop - start) // width if begin == 0 else 0
        end = width if rows else min(width, begin + stop - start)
        rows = rows or 1
        for at, full_start, size in spans:
            low, high = max(at, begin), min(at + size, end)
            if low < high:
                place = start - (stop - length) + low - begin
                yield (
                    _runs(number * row + full_start + low - at, high - low, row, rows),
                    _runs(place, high - low, width, rows),
                )
        start += (rows - 1) * width + end - begin


def _runs(start: int, length: int, stride: int, runs: int) -> Region:
    return Region(start, length, stride, runs) if runs > 1 else Region(start, length)


def plan_tensor(part: Part, config: Config, world: World) -> tuple[TensorSplit, WholeModel]:
    """Return how the model is split, found on rank 0 while it has it whole, and loss and gradients of the whole one."""
    refuse_part(part, config)
    mesh = world.groups.devices["tensor"]
    batch, plans, full = made_on_first_rank(world, lambda: _try_model(part, config, mesh))
    cuts = cuts_of_model(part.module, plans, None, config.parallel.tensor)
    return TensorSplit(batch, plans, cuts, world.mesh.seat["tensor"], calls_of_blocks(part.module, plans)), full


def _try_model(part: Part, config: Config, mesh: DeviceMesh) -> tuple[Any, Mapping[str, BlockPlan], WholeModel]:
    """Return a sample, the plans of all blocks, and loss and gradients of the model, which is whole here."""
    assert part.loss is not None
    assert part.sample is not None
    batch = part.sample()
    cast_to = batch_dtype(config.train.precision)
    cast_batch = batch if cast_to is None else cast_floats(batch, cast_to)
    facts = look_at_model(part.module, part.blocks, part.loss, cast_batch, 1)
    wanted = part.tensor or {}
    plans = plan_blocks(part.module, facts.blocks, facts.block_inputs, mesh, wanted, matrices_left_whole)
    refuse_empty_plans(config.parallel.tensor, plans.values(), part.blocks)
    return batch, plans, whole_gradients(part.module, part.loss, cast_batch)


def use_groups(world: World) -> None:
    """Give DeepSpeed this world's groups along `tensor` and the data, in place of those of an earlier engine."""
    forget_groups()
    if world.mesh.sizes["tensor"] > 1:
        for name, axis in _AXIS_OF_GROUP.items():
            setattr(deepspeed_groups, name, world.groups.group(axis))
        deepspeed_groups.mpu = deepspeed_groups
    if world.mesh.expert > 1:
        copies = world.groups.copies_and_shards_of_experts(1).get_group("copies")
        for name, group in zip(_GROUPS_OF_EXPERTS, (world.groups.experts(), copies), strict=True):
            getattr(deepspeed_groups, name)[f"ep_size_{world.mesh.expert}"] = group
            ranks = dist.get_process_group_ranks(group)
            getattr(deepspeed_groups, f"{name}_RANKS")[f"ep_size_{world.mesh.expert}"] = ranks


def forget_groups() -> None:
    """Drop the groups that `use_groups` gave to DeepSpeed."""
    for name in (*_AXIS_OF_GROUP, "mpu"):
        setattr(deepspeed_groups, name, None)
    for name in _GROUPS_OF_EXPERTS:
        getattr(deepspeed_groups, name).clear()
        getattr(deepspeed_groups, f"{name}_RANKS").clear()


_AXIS_OF_GROUP = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "_MODEL_PARALLEL_GROUP": "tensor",
    "_DATA_PARALLEL_GROUP": "data",
}
"""DeepSpeed's variables of process groups, and the axis along which each lies."""

_GROUPS_OF_EXPERTS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP")
"""DeepSpeed's tables of process groups: of ranks that have all experts together, and of those that have the same."""


def finish_split(part: Part, split: TensorSplit, engine: Any, world: World) -> None:
    """Make the blocks, whose matrices DeepSpeed has cut, run on their parts.

    DeepSpeed's layers communicate; what the user's code asks for between them, such as a number of heads, does not
    know of parts.
    """
    engine.first_dataloader_check.remove()  # it would pickle the batch and the loss; unipar's ranks share a batch
    for name, p in part.module.named_parameters():
        shape = tuple(getattr(p, "ds_shape", p.shape))
        if name in split.cuts and shape != split.cuts[name].local_shape():
            raise TaskError(f"AutoTP made {shape} of {name}, whose part has the shape {split.cuts[name].local_shape()}")
    group = world.groups.group("tensor")
    for name, plan in split.plans.items():
        arm_block(part.module.get_submodule(name), replace(plan, cuts={}), group, sites=split.calls.get(name))


def keep_sizes(module: nn.Module, split: TensorSplit) -> list[nn.Module]:
    """Mark modules so that DeepSpeed leaves their numbers, such as `num_heads`, alone; return them.

    It would divide attributes by a list of names. The plan's rewrites divide what the block asks for, whatever its
    name.
    """
    cut = {id(module.get_submodule(name.rpartition(".")[0])) for name in split.cuts}
    marked = [m for m in module.modules() if id(m) not in cut]
    for m in marked:
        setattr(m, _SEEN, True)
    return marked


def let_sizes(marked: list[nn.Module]) -> None:
    """Remove the marks of `keep_sizes`."""
    for m in marked:
        delattr(m, _SEEN)


_SEEN = "replaced"
"""Attribute by which DeepSpeed knows modules that it is done with."""


def prove_split(
    part: Part, split: TensorSplit | ExpertSplit, call: ForwardCall, world: World, full: WholeModel, config: Config
) -> None:
    """Raise TaskError unless the split model has the whole one's loss and gradients on its samples."""
    assert part.loss is not None
    batch = split.batch
    if (cast_to := batch_dtype(config.train.precision)) is not None:
        batch = cast_floats(batch, cast_to)
    batch = to_device(batch, world.device)
    modes = [(module, module.training) for module in call.modules()]
    autocast, call.autocast = call.autocast, None
    call.eval()
    try:
        with kept_random_state(), kept_attributes([getattr(part.loss, "__self__", None)]):
            loss: Tensor = call(part.loss, OpaqueBatch(batch))  # in its forward ZeRO-3 gathers what the loss reads
            named = {name: p for name, p in part.module.named_parameters() if p.requires_grad}
            gradients: Any = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    finally:
        call.autocast = autocast
        for module, mode in modes:
            module.training = mode
    mine = zip(named.items(), gradients, strict=True)
    counts = world.data_rank < split.samples  # further ranks have the same samples
    held = {name: g.contiguous().view(-1) / split.samples for (name, _), g in mine if g is not None and counts}
    sketches = sketch_regions(list(full.gradients), _regions_of_parts(split, held))
    sketches = world.sum(sketches.to(world.device)).cpu()
    mean = world.sum(loss.detach().double()) / world.size
    _, dtype = trained_and_narrowest_dtypes(part.module)
    refuse_difference(full, float(mean), sketches, dtype, str(config.parallel.axes))


def _regions_of_parts(
    split: TensorSplit | ExpertSplit, held: Mapping[str, Tensor]
) -> Iterator[tuple[str, int, Region, Tensor]]:
    for name, flat in held.items():
        if name in split.cuts:
            numel = torch.Size(split.cuts[name].shape).numel()
            for where, local in split.regions(name, 0, flat.numel()):
                yield split.saved_name(name), numel, where, local.of(flat)
        elif split.speaks_for_whole:
            yield split.saved_name(name), flat.numel(), Region(0, flat.numel()), flat
