"""Digests of the values of a script's step, and faults that one process finds without the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unipar.engines.state import local_part
from unipar.observing.process.script_state import (
    ScriptState,
    is_a,
    is_sharded,
    own_name,
    parameters_of,
    seat_in_mesh,
)
from unipar.results.observed_rank import LocalFault, ObservedState
from unipar.training.watch.digests import digest_tensor
from unipar.utils.text import first_few, short_dtype

_MASTER_KEYS = ("master", "fp32", "exp_avg_master")
"""Parts of keys under which optimizers keep an exact copy of a coarse weight."""


@torch.no_grad()
def digest_weights(state: ScriptState) -> dict[str, int]:
    """Return a digest of each weight of which ranks should have equal values."""
    return {name + seat_in_mesh(p): _digest(local_part(p)) for name, p in _comparable(state)}


@torch.no_grad()
def digest_gradients(state: ScriptState, optimizer: Optimizer) -> dict[str, int]:
    """Return a digest of each gradient that an optimizer is given and that ranks should have reduced."""
    own = {id(p) for p in parameters_of(optimizer)}
    return {
        name + seat_in_mesh(p): _digest(local_part(p.grad))
        for name, p in _comparable(state)
        if id(p) in own and p.grad is not None and not _is_partial(p.grad)
    }


def _is_partial(gradient: Tensor) -> bool:
    """Return whether ranks hold addends of a gradient, which DTensor adds up in the optimizer."""
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


@torch.no_grad()
def digest_state(state: ScriptState, steps: int, gradients: dict[str, int]) -> ObservedState:
    """Return digests of all values of which ranks should have equal ones, after a step."""
    return ObservedState(
        weights=digest_weights(state),
        buffers={name: _digest(local_part(b)) for name, b in state.named_buffers() if b.numel() and _is_here(b)},
        states=_digest_states(state),
        gradients=gradients,
        steps=steps,
    )


def _digest_states(state: ScriptState) -> dict[str, int]:
    seats = {name: seat_in_mesh(p) for name, p in _comparable(state)}
    return {
        f"{key} of {name}{seats[name]}": _digest(local_part(value))
        for name, key, value in state.named_states()
        if name in seats and value.numel() and _is_here(value)
    }


def _digest(tensor: Tensor) -> int:
    """Return the digest of a tensor that may be sparse, or of a dtype that torch cannot combine by exclusive or."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    return digest_tensor(tensor)


def _comparable(state: ScriptState) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of which ranks hold equal values: whole ones, and equal parts of split ones."""
    for name, p in state.named_parameters(trained=True):
        if (seat_in_mesh(p) or not is_sharded(p)) and _is_here(p) and local_part(p).numel():
            yield name, p


def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout == torch.strided


@torch.no_grad()
def gradient_norms(optimizer: Optimizer) -> dict[int, float]:
    """Return the norm of each gradient that an optimizer is given, of this rank's part, by id of the parameter."""
    return {
        id(parameter): _norm(local_part(parameter.grad).detach())
        for parameter in parameters_of(optimizer)
        if parameter.grad is not None
    }


def _norm(gradient: Tensor) -> float:
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return float(torch.linalg.vector_norm(values.float()))


def learning_rates(optimizer: Optimizer) -> dict[int, float]:
    """Return the learning rate of each parameter of an optimizer, by id; none if the optimizer chooses it itself."""
    return {
        id(parameter): float(group["lr"])
        for group in optimizer.param_groups
        if group.get("lr") is not None
        for parameter in group["params"]
    }


def has_parts(optimizer: Optimizer) -> bool:
    """Return whether this rank has only a part of an optimizer's parameters."""
    return any(bool(seat_in_mesh(p)) or is_sharded(p) for p in parameters_of(optimizer))


def digest_batch(batch: Any) -> int | None:
    """Return a digest of all tensors in a batch, or None if it has none."""
    tensors = list(_tensors_of(batch))
    if not tensors:
        return None
    return hash(tuple(_digest(t) for t in tensors)) & ((1 << 62) - 1)


def first_dimension(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch."""
    return next((t.shape[0] for t in _tensors_of(batch) if t.dim()), None)


def _tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.numel() and batch.layout == torch.strided:
            yield batch
    elif isinstance(batch, dict) or (hasattr(batch, "data") and isinstance(batch.data, dict)):
        for value in (batch if isinstance(batch, dict) else batch.data).values():
            yield from _tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors_of(value)


def has_dropout(state: ScriptState) -> bool:
    """Return whether a model drops values at random."""
    return any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training  # pyright: ignore[reportPrivateUsage]
        for model in state.trained
        for module in model.modules()
    )


def expects_uneven_batches(state: ScriptState) -> bool:
    """Return whether a wrapper was told by its `join` that ranks have unequally many batches."""
    configs = (getattr(module, "_join_config", None) for model in state.trained for module in model.modules())
    return any(bool(getattr(config, "enable", False)) for config in configs)


def splits_tensors(state: ScriptState) -> bool:
    """Return whether ranks split tensors and no wrapper gathers them: they share the work on each sample."""
    split = any(isinstance(p, DTensor) for _, p in state.named_parameters(trained=True))
    return split and not any(is_a(module, "FSDPModule") for model in state.trained for module in model.modules())


def unsynced_batch_norms(state: ScriptState) -> tuple[str, ...]:
    """Return the names of modules of batch normalisation that see this rank's samples alone."""
    return tuple(
        own_name(name)
        for model in state.trained
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
        and module.track_running_stats
    )


def find_weights_outside(state: ScriptState, step: int) -> Iterator[LocalFault]:
    """Yield the fault that weights get gradients and no optimizer has them; a library's own copies explain that."""
    updated = {id(p) for optimizer in state.optimizers for p in parameters_of(optimizer)}
    named = dict(state.named_parameters(trained=True))
    outside = [name for name, p in named.items() if p.grad is not None and p.requires_grad and id(p) not in updated]
    lost = [tensor for _, tensor in state.masters()] if outside else []
    if outside and all(tensor.grad is None for tensor in lost):  # else they are a library's copies of the weights
        yield LocalFault(
            kind="weights outside the optimizer",
            step=step,
            parameter=outside[0],
            detail=f"{first_few(outside)} got gradients and no optimizer has them"
            + (f", while the optimizer has {len(lost)} tensors that no model has" if lost else ""),
        )


def find_coarse_dtypes(state: ScriptState, step: int) -> Iterator[LocalFault]:
    """Yield the fault that weights are updated, or the optimizer's state is kept, in a coarse dtype."""
    names = {id(p): name for name, p in state.named_parameters()}
    for optimizer in state.optimizers:
        for parameter in parameters_of(optimizer):
            if parameter.grad is None and not parameter.requires_grad:
                continue
            kept = optimizer.state.get(parameter, {})
            exact = any(part in str(key) for key in kept for part in _MASTER_KEYS)
            name = names.get(id(parameter), "a parameter")
            if parameter.dtype in (torch.float16, torch.bfloat16) and not exact:
                yield LocalFault(
                    kind="coarse dtype",
                    step=step,
                    parameter=name,
                    detail=f"the optimizer updates {name} in {short_dtype(parameter.dtype)}, without an fp32 copy: "
                    "small updates are lost",
                )
                return
            for key, value in kept.items():
                if (
                    isinstance(value, Tensor)
                    and value.dim()
                    and value.dtype.is_floating_point
                    and value.dtype.itemsize < parameter.dtype.itemsize
                    and value.dtype.itemsize > 1
                ):
                    yield LocalFault(
                        kind="coarse dtype",
                        step=step,
                        parameter=name,
                        detail=f"{name} is {short_dtype(parameter.dtype)}, and the optimizer keeps its {key} in "
                        f"{short_dtype(value.dtype)}",
                    )
                    return


def find_idle_update(
    state: ScriptState,
    step: int,
    norms: Mapping[int, float],
    rates: Mapping[int, float],
    before: Mapping[str, int],
    after: Mapping[str, int],
) -> Iterator[LocalFault]:
    """Yield the fault that an update left weights as they were, though they have gradients and a learning rate.

    `norms` of the gradients and `rates` are those that the optimizers were given; `before` and `after` are digests of
    the weights. In fp32 it is a fault only if no weight has changed: the gradient of a bias before a norm is nothing
    but rounding.
    """
    trained = [
        (name, p, name + seat_in_mesh(p), norms[id(p)], rates.get(id(p), 0.0))
        for name, p in state.named_parameters(trained=True)
        if norms.get(id(p), 0.0) > 0 and rates.get(id(p), 0.0) > 0
    ]
    compared = [row for row in trained if row[2] in before and row[2] in after]
    any_changed = any(before[key] != after[key] for _, _, key, _, _ in compared)
    for name, p, key, norm, rate in compared:
        if before[key] == after[key] and (p.dtype.itemsize < 4 or not any_changed):
            yield LocalFault(
                kind="update without effect",
                step=step,
                parameter=name,
                detail=f"the update left {name} as it was, though its gradient's norm is {norm:.3g} and the learning "
                f"rate {rate:.3g}",
            )
            return
