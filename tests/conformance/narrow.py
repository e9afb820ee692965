"""Frozen weights in bf16 beside adapters in fp32, for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.conformance import tasks


class Narrow(nn.Linear):
    """A linear layer that keeps its weights in bf16 and computes in its input's dtype."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        assert self.weight.dtype is self.bias.dtype is torch.bfloat16, "a frozen weight lost its author's dtype"
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class Adapter(nn.Module):
    """A frozen layer, and what is trained beside it."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = Narrow(inside, outside, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(inside, 2, bias=False), nn.Linear(2, outside, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        assert self.up.weight.dtype is torch.float32
        return self.base(x) + self.up(self.down(x))


class Adapted(tasks.Plain):
    """All is frozen but adapters, norms and the head; the embedding is narrow too."""

    @override
    def model(self) -> nn.Module:
        model: Any = super().model()
        model.embed.to(torch.bfloat16).requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapter(tasks.D, 3 * tasks.D), Adapter(3 * tasks.D, tasks.D)
        return model
