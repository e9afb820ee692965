"""The two operations between whole and cut activations: identity forward and sum backward, and the reverse."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


@final
class _Enter(torch.autograd.Function):
    """Identity; backward adds up the gradients of all ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, alone: bool) -> Tensor:
        ctx.group, ctx.alone = group, alone
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] - a plan's mode has no part here
            return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous() if ctx.alone else grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


@final
class _Leave(torch.autograd.Function):
    """Sum over all ranks; backward is the identity."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            x = x.contiguous()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def enter(x: Tensor, group: dist.ProcessGroup | None, *, alone: bool = False) -> Tensor:
    """Return a whole tensor for use on parts: its gradients are added up over the group.

    `alone`: only matrix products use the result, so that nobody else holds its gradient, which is overwritten.
    """
    if group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Enter.apply(x, group, alone)  # pyright: ignore[reportReturnType]


def leave(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of partial results over the group; `x` is overwritten."""
    if group is None:
        return x
    return _Leave.apply(x, group)  # pyright: ignore[reportReturnType]
