"""A character GPT that asks the device for more than there is, in one phase of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from examples.char_gpt import CharGPT, Codes

ABSURD = 2**40


class AskInBackward(torch.autograd.Function):
    """Identity whose backward allocates."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient + torch.empty(ABSURD, device=gradient.device).sum()


class AskInUpdate(torch.optim.SGD):
    """Stochastic gradient descent whose step allocates."""

    @override
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.empty(ABSURD, device=self.param_groups[0]["params"][0].device)


class Greedy(CharGPT):
    """Asks in the phase `way`: forward, backward or update."""

    def __init__(self, way: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.way = way

    @override
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return (AskInUpdate if self.way == "update" else torch.optim.SGD)(groups, lr=0.01)

    @override
    def loss(self, model: nn.Module, batch: Codes) -> Tensor:
        loss = super().loss(model, batch)
        if self.way == "forward":
            loss = loss + torch.empty(ABSURD, device=loss.device).sum()
        return AskInBackward.apply(loss) if self.way == "backward" else loss  # pyright: ignore[reportReturnType]
