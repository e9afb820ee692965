"""Task so small that a run of it consists of set-up only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar


class Line(unipar.Task):
    """Task of one linear layer."""

    @override
    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    @override
    def data(self) -> TensorDataset:
        same = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(16, 2, generator=same), torch.randn(16, 1, generator=same))

    @override
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])
