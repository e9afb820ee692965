"""Tensors that ZeRO 0 to 3 keeps, by memory category."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from torch import Tensor, nn

from unipar.backend import Category, Holding

_OPTIMIZER_ATTRIBUTES: tuple[tuple[Category, str], ...] = (
    ("parameters", "bit16_groups_flat"),  # stages 1 and 2: all parameters are views of it
    ("parameters", "lp_param_buffer"),  # stage 3
    ("parameters", "fp16_partitioned_groups_flat"),
    ("parameters", "param_groups_fp16_flat_cpu_memory"),
    ("masters", "fp32_groups"),  # stage 0
    ("masters", "single_partition_of_fp32_groups"),
    ("masters", "fp32_partitioned_groups_flat"),
    ("gradients", "averaged_gradients"),
    ("gradients", "all_grad_tensors"),
    ("gradients", "grads_in_partition"),
    ("gradients", "accumulated_grads_in_cpu"),
    ("gradients", "grad_partitions_flat_buffer"),
    ("communication", "param_buffer_of_bit16_for_cpu_offload_groups"),
    ("communication", "temp_grad_buffer_for_cpu_offload"),
    ("communication", "temp_grad_buffer_for_gpu_offload"),
)
"""Attributes of ZeRO's optimizer that are tensors, or lists and dicts of tensors."""


def zero_holdings(model: nn.Module, engine: Any) -> Iterator[Holding]:
    """Yield parameters, masters, gradients, states and buckets; several of them may be views of one buffer."""
    zero, base = engine.optimizer, engine.basic_optimizer
    buffers = [Holding("communication", name, t) for name, t in _swap_buffers(model, zero)]
    yield from buffers
    swaps = {holding.tensor.untyped_storage().data_ptr() for holding in buffers}
    for name, p in model.named_parameters():
        yield from _parameter_holdings(name, p, swaps)
    for category, attribute in _OPTIMIZER_ATTRIBUTES:
        for i, t in enumerate(_find_tensors(getattr(zero, attribute, None))):
            yield Holding(category, f"{attribute}[{i}]", t)
            if category == "masters" and t.grad is not None:
                yield Holding("gradients", f"{attribute}[{i}].grad", t.grad)
    for i, state in enumerate(base.state.values()):
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield Holding("optimizer", f"{key}[{i}]", value)
    for dtype, bucket in getattr(zero, "ipg_buckets", {}).items():
        for t in _find_tensors(bucket.buffer):
            yield Holding("communication", f"bucket of {dtype}", t)


def _swap_buffers(model: nn.Module, zero: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers through which tensors pass on their way to the disk and back."""
    if (swapper := getattr(zero, "optimizer_swapper", None)) is not None:
        for i, t in enumerate(swapper.swap_buffer_manager.all_buffers):
            yield f"swap buffer of the optimizer[{i}]", t
    for swapper in {
        id(s): s for p in model.parameters() if (s := getattr(p, "nvme_swapper", None)) is not None
    }.values():
        yield "swap buffers of parameters", swapper.buffers
        if swapper.partitioned_swap_buffer is not None:
            yield "swap buffer for updated parameters", swapper.partitioned_swap_buffer


def _parameter_holdings(name: str, p: Any, swaps: Set[int]) -> Iterator[Holding]:
    """`swaps`: addresses of swap buffers, in one of which a partition may be for now."""
    if hasattr(p, "ds_tensor"):
        if p.ds_tensor.untyped_storage().data_ptr() not in swaps:
            yield Holding("parameters", name, p.ds_tensor)
        yield Holding("communication", f"{name}, gathered", p.data)  # empty while the parameter is not gathered
    else:
        yield Holding("parameters", name, p.data)
    for grad in (p.grad, getattr(p, "grad_accum", None)):
        if grad is not None:
            yield Holding("gradients", name, grad)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _find_tensors(inner)
