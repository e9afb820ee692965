"""Scaling of the loss, and clipping of gradients by a norm in fp32 or fp64."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import clip_grad_norm_, get_total_norm

from unipar.distributed.world import World

_WIDE_DTYPES = (torch.float32, torch.float64)


def scale_loss(loss: Tensor, scale: float, divisor: float, share: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss to run backward on, and this rank's share of the loss, summed up to this microbatch."""
    if loss.dtype not in _WIDE_DTYPES:
        loss = loss.float()
    no_copy = scale == 1.0 and loss.is_cpu  # saves 15 us; on CUDA a graph's next replay overwrites its output
    part = loss.detach() if no_copy else loss.detach() * scale
    factor = scale * divisor
    return (loss if factor == 1.0 else loss * factor), (part if share is None else share + part)


def clip_gradients(params: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Clip gradients and return their norm before; a limit of inf changes none of them, even if the norm overflows."""
    if limit == inf:
        return get_total_norm([p.grad for p in params if p.grad is not None])
    return clip_grad_norm_(params, limit)


def clip_alike(grads: list[Tensor], limit: float) -> Tensor:
    """Clip gradients of one device and dtype to a finite limit as `clip_grad_norm_` does; return their norm before.

    It saves half of its time on a small model: the search for devices and dtypes, and a gradient mode of its own.
    """
    norm = vector_norm(torch.stack(torch._foreach_norm(grads)))  # pyright: ignore[reportPrivateUsage]
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateUsage]
    return norm


def clip_in_fp64(grads: tuple[list[Tensor], bool], limit: float, world: World, copies: int = 1) -> Tensor:
    """Clip by the norm summed in fp64 and return it: its rounding does not depend on how gradients are split.

    `grads` are this rank's gradients and whether they are split; if so, all ranks' parts make `copies` whole gradients.
    """
    mine, split = grads
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for g in mine:
        total += g.double().square().sum().to(total.device)  # a model may be spread over devices by hand
    if split:
        world.sum(total)
        total /= copies
    return _scale_to_limit(mine, total.sqrt(), limit)


def clip_counted(grads: Sequence[Tensor], counted: Sequence[Tensor], limit: float, world: World) -> Tensor:
    """Clip by the norm summed in fp64 and return it; `counted` are this rank's gradients that no other rank counts."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for g in counted:
        total += g.double().square().sum()
    return _scale_to_limit(grads, world.sum(total).sqrt(), limit)


def _scale_to_limit(grads: Sequence[Tensor], norm: Tensor, limit: float) -> Tensor:
    """Scale gradients whose norm is above the limit down to it, and return the norm."""
    if limit == inf or not grads:
        return norm
    if norm.is_cpu or any(g.dtype not in _WIDE_DTYPES for g in grads):  # a factor on a device is rounded to 16 bits
        if (factor := limit / (norm.item() + 1e-6)) < 1.0:
            torch._foreach_mul_(list(grads), factor)  # pyright: ignore[reportPrivateUsage]
        return norm
    on_device = limit / (norm + 1e-6)
    torch._foreach_mul_(list(grads), torch.where(on_device < 1.0, on_device, 1.0))  # pyright: ignore[reportPrivateUsage]
    return norm
