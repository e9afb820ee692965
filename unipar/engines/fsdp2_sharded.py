"""Base of engines over FSDP2: parameters, gradients and optimizer states are DTensors, whoever has sharded them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from unipar.backend import Holding
from unipar.backend.file_values import FileValues
from unipar.engines.gradients import clip_gradients
from unipar.engines.state import local_part, local_regions
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError

_SPLIT_MARK = "_is_fsdp_managed_module"
"""Attribute of FSDP2's by which other libraries know that a module's parameters are split."""

_READ_OUTSIDE_BLOCK = (
    "the loss reads a parameter of a block outside that block's forward, where it is sharded: "
    "read it in the block's own forward, or set model.blocks: none"
)


class ShardedEngine(WrapperEngine):
    """Base of engines over FSDP2, whoever sharded the model: reduction, clip and memory holdings."""

    once = False
    """True: gradients stay whole and parameters gathered until the last microbatch, in which gradients are reduced."""

    @override
    @final
    def sync(self, micros: int, *, last: bool) -> None:
        if self.once and micros > 1:
            for module in self._groups:
                module.set_requires_gradient_sync(last, recurse=False)
                module.set_reshard_after_backward(last, recurse=False)

    @cached_property
    def _groups(self) -> tuple[FSDPModule, ...]:
        return tuple(m for m in self.wrapped.modules() if isinstance(m, FSDPModule))

    @override
    def backward(self, loss: Tensor) -> None:
        if isinstance(loss, DTensor):
            raise TaskError(_READ_OUTSIDE_BLOCK)
        loss.backward()

    @override
    def norm(self) -> Tensor:
        norm: Any = clip_gradients(self.trained, self.limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # each rank's own otherwise

    @override
    def _local_grads(self) -> tuple[list[Tensor], bool]:
        return [local_part(p.grad) for p in self.trained if p.grad is not None], True

    @override
    def extra_holdings(self) -> Iterator[Holding]:
        names = {id(p): name for name, p in self.kept.items()}
        modules: tuple[Any, ...] = self._groups
        states = [module._get_fsdp_state() for module in modules]
        for group in (group for state in states for group in fsdp_groups(state)):
            yield from _group_holdings(group, names)
        for state in states[:1]:  # all states share one context, which is empty until the first forward
            context = state._comm_ctx
            if (gathered := getattr(context, "all_gather_state", None)) is not None:
                yield Holding("communication", "all-gather", gathered.all_gather_result.all_gather_output)
            for reduced in reduce_scatter_states(context):
                yield Holding("communication", "reduce-scatter", reduced.reduce_scatter_input)

    @override
    @contextmanager
    def all_parameters(self) -> Generator[None]:
        self.run_forward(_compute_nothing, None)  # in the first forward FSDP2 settles which module is the root
        self.before_state_access()
        marked = [m for m in self.wrapped.modules() if vars(m).get(_SPLIT_MARK)]
        groups = [group for module in self._groups for group in fsdp_groups(_state_of(module))]
        try:
            with _forwards_unrecorded(groups), ExitStack() as stay_gathered:
                for module in self._groups:
                    module.unshard()
                for group in groups:  # state_dict() splits parameters by it first, as FSDP2 wants to save them
                    stay_gathered.callback(delattr, group, "_to_sharded")
                    group._to_sharded = _leave_gathered
                for module in marked:
                    setattr(module, _SPLIT_MARK, False)  # by it transformers' generate waits for other ranks
                yield
        finally:
            for module in marked:
                setattr(module, _SPLIT_MARK, True)
            self.before_state_access()

    @override
    def apart_from_backward(self) -> AbstractContextManager[None]:
        return _order_of_forwards_kept([g for module in self._groups for g in fsdp_groups(_state_of(module))])

    @override
    def whole_bytes(self) -> int:
        groups = [group for module in self._groups for group in fsdp_groups(_state_of(module))]
        return sum(_gathered_bytes(p) for group in groups for p in group.fsdp_params)

    @override
    def before_state_access(self) -> None:
        for module in self._groups:
            module.reshard()  # a forward may have left parameters gathered, but the optimizer updates the shards


def _leave_gathered() -> None:
    """Do nothing: the function that stands for splitting gathered parameters again."""


def _compute_nothing(model: nn.Module, inputs: None) -> None:
    """Compute nothing: the function of a forward for FSDP2's own set-up alone."""


@contextmanager
def _forwards_unrecorded(groups: Sequence[Any]) -> Generator[None]:
    """Context manager: forwards release no parameters, and leave no trace in FSDP2's order of forwards."""
    before = [(group, group.post_forward_mesh_info) for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    try:
        with _order_of_forwards_kept(groups):
            yield
    finally:
        for group, mesh in before:
            group.post_forward_mesh_info = mesh


@contextmanager
def _order_of_forwards_kept(groups: Sequence[Any]) -> Generator[None]:
    """Context manager: forwards leave no trace in FSDP2's order of forwards.

    By that order the next backward gathers ahead: if one rank ran more forwards than another, they would wait in
    different collectives.
    """
    before = [(group, list(group._post_forward_indices)) for group in groups]
    count = len(_order_of_forwards(groups))
    try:
        yield
    finally:
        for group, indices in before:
            group._post_forward_indices = indices
        del _order_of_forwards(groups)[count:]


def _order_of_forwards(groups: Sequence[Any]) -> list[Any]:
    """Return the order in which all groups ran forward; empty before the first, in which they come to share it."""
    return getattr(groups[0].comm_ctx, "post_forward_order", []) if groups else []


def _gathered_bytes(p: Any) -> int:
    """Return the bytes of a whole parameter of FSDP2, in the dtype in which it is gathered."""
    return p.sharded_param.numel() * (p.param_dtype or p.sharded_param.dtype).itemsize


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def fsdp_groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 keeps for one module: torch 2.11 has one or None, later a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def reduce_scatter_states(context: Any) -> Sequence[Any]:
    """Return the reductions whose input FSDP2 still keeps: torch 2.11 has one or None, later a list.

    Before the first forward there is neither.
    """
    if hasattr(context, "reduce_scatter_states"):
        return context.reduce_scatter_states
    only = getattr(context, "reduce_scatter_state", None)
    return () if only is None else (only,)


def _group_holdings(group: Any, names: Mapping[int, str]) -> Iterator[Holding]:
    """Yield the tensors that one group of parameters keeps besides its shards."""
    for p in group.fsdp_params:
        for gathered in p.all_gather_outputs:
            yield Holding("communication", f"{names[id(p.sharded_param)]}, gathered", gathered)
        whole_grad = getattr(getattr(p, "_unsharded_param", None), "grad", None)
        for grad in (whole_grad, p.unsharded_accumulated_grad):
            if grad is not None:
                yield Holding("gradients", f"{names[id(p.sharded_param)]}, not reduced", local_part(grad))
    if group._all_gather_result is not None:
        yield Holding("communication", "all-gather", group._all_gather_result.all_gather_output)
    if group._partial_reduce_output is not None:
        yield Holding("gradients", "reduced within one copy", group._partial_reduce_output)
    if group._all_reduce_state is not None:
        yield Holding("communication", "all-reduce", group._all_reduce_state.all_reduce_input)


def fill_shard(empty: DTensor, full: Tensor, home: torch.device) -> DTensor:
    """Return a shard like `empty`, which has no memory, with this rank's part of the whole tensor, on device `home`."""
    new = _empty_shard(empty, home)
    for where, elements in local_regions(new):
        elements.copy_(where.of(full).view(-1))
    return new


@torch.no_grad()
def read_shard(empty: DTensor, values: FileValues, home: torch.device) -> DTensor:
    """Return a shard like `empty`, which has no memory, with this rank's part as it is in a file."""
    new = _empty_shard(empty, home)
    for where, elements in local_regions(new):
        values.read_into(where, elements)
    return new


def _empty_shard(empty: DTensor, home: torch.device) -> DTensor:
    """Return a shard like `empty` with memory at `home`; `DTensor.from_local` would move it to the mesh's device."""
    local = torch.empty_like(empty.to_local(), device=home)
    return DTensor(local, empty._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage, reportCallIssue]
