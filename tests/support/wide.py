"""Task whose microbatches take megabytes, and its model few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

import unipar


class Wide(unipar.Task):
    """Numbers, each multiplied with half a million weights."""

    @override
    def model(self) -> nn.Module:
        return nn.Linear(1, 2**19, bias=False)

    @override
    def data(self) -> list[Tensor]:
        return [torch.full((1,), i / 64) for i in range(64)]

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()
