"""Tasks that a mesh can split in few ways, or in none: skips, state kept on modules, an optimizer of whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.support.stacked import Stack, Stacked


class Skipping(Stacked):
    """The first block's output is read by the last: only the cut right behind the first block is possible."""

    def __init__(self, cuts: Sequence[str] | None = None) -> None:
        super().__init__(skip=True)
        self.given = cuts

    @override
    def cuts(self, stages: int) -> Sequence[str] | None:
        return self.given


class _AllRead(Stack):
    """What is inside each block is read at the model's end."""

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        read: list[Tensor] = []
        hooks = [
            block.get_submodule("out").register_forward_hook(lambda _, args, out: read.append(out.mean()))
            for block in self.blocks
        ]
        try:
            return super().forward(tokens) * (1 + torch.stack(read).sum())
        finally:
            for hook in hooks:
                hook.remove()


class Reading(Stacked):
    @override
    def model(self) -> nn.Module:
        return _AllRead(**self.settings)


class Whole(Stacked):
    """Its optimizer turns a matrix's gradient by the matrix."""

    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return Normed(groups)


class Normed(torch.optim.Optimizer):
    """Steps as long as the tensor they change."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @override
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.norm() / (p.grad.norm() + 1e-6) * p.grad


class Misnamed(Stacked):
    @override
    def tensor(self, model: nn.Module) -> Mapping[str, str]:
        return {"blocks.*.query": "column"}
