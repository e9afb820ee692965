"""DeepSpeed's AutoTP without DeepSpeed: matrices that it leaves whole, and its layers on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override
from unipar_mesh.tensor.cuts import BlockPlan, is_transposed
from unipar_mesh.tensor.tensor_parallel import Undo, arm_block, replace_forward


def matrices_left_whole(block: nn.Module) -> dict[str, str]:
    """Return the matrices of a block that DeepSpeed does not cut as they must be, each with the reason."""
    reasons: dict[str, str] = {}
    for name, module in block.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            reasons[name] = "AutoTP replaces linear layers, and nn.MultiheadAttention keeps its projections itself"
            reasons[f"{name}.out_proj"] = reasons[name]
        elif is_transposed(module):
            reasons[name] = "AutoTP cuts a Conv1D as if its weight had the output first"
    return reasons


def arm_as_autotp(block: nn.Module, plan: BlockPlan, group: dist.ProcessGroup) -> list[Undo]:
    """Make a block with this rank's parts of matrices compute as it does under AutoTP, for `unipar plan`.

    The same operations in the same order as in DeepSpeed's `LinearLayer` and `LinearAllreduce`: they decide what
    autograd keeps.
    """
    undo = [
        replace_forward(block.get_submodule(name), _layer(block.get_submodule(name), cut.kind, group))
        for name, cut in plan.cuts.items()
    ]
    return undo + arm_block(block, replace(plan, cuts={}), group)


def _layer(module: Any, kind: str, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = _SummedBackward.apply(x, group) if kind == "column" else x  # pyright: ignore[reportAssignmentType]
        out: Any = torch.matmul(x, module.weight.transpose(-1, -2))
        out = out if kind == "column" else _SummedForward.apply(out, group)
        return out if module.bias is None else out + module.bias

    return forward


@final
class _SummedBackward(torch.autograd.Function):
    """DeepSpeed's `ColumnParallel`: the input, whose gradients are added up over the ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        dist.all_reduce(grads[0].contiguous(), group=ctx.group)
        return grads[0], None


@final
class _SummedForward(torch.autograd.Function):
    """DeepSpeed's `RowParallel`: the sum over the ranks, written into the input."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x.contiguous(), group=group)
        return x

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
