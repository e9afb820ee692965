"""Task of the bubble's measurement: blocks that sleep instead of computing, so that several ranks share one core."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from typing_extensions import override

import unipar

FORWARD_SECONDS, BACKWARD_SECONDS = 0.02, 0.04


class _SleepForInput(torch.autograd.Function):
    """Identity that takes a block's time in forward, and half of its backward's."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(BACKWARD_SECONDS / 2)
        return gradient


class _SleepForWeight(torch.autograd.Function):
    """Identity of a weight that takes the other half: zerobubble runs it apart from the gradients of inputs."""

    @staticmethod
    @override
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return weight.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(BACKWARD_SECONDS / 2)
        return gradient


class SleepingBlock(nn.Module):
    """Block with one weight, whose forward and backward take a fixed time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = _SleepForInput.apply(x)  # pyright: ignore[reportAssignmentType]
        return x + _SleepForWeight.apply(self.weight)  # pyright: ignore[reportOperatorIssue]


class _Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4096

    @override
    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class Sleeping(unipar.Task):
    """Blocks in a line, which sleep."""

    def __init__(self, blocks: int) -> None:
        self.count = blocks

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(SleepingBlock() for _ in range(self.count))))

    @override
    def blocks(self, model: nn.Module) -> Any:
        return [f"1.{number}" for number in range(self.count)]

    @override
    def data(self) -> Dataset[Tensor]:
        return _Rows()

    @override
    def cuts(self, stages: int) -> list[str]:
        """Cut into equal stages: times of sleeping blocks differ by what else the machine does."""
        each = self.count // stages
        return [f"1.{each * number}" for number in range(1, stages)]

    @override
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()
