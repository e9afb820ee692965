"""A model of shapes drawn at random, to be planned and to be trained."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar import Task


class Shapes(Task):
    """An embedding that is also the head, and layers of any widths between them."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.widths = [draw.randint(3, 90) for _ in range(draw.randint(2, 6))]
        self.words, self.frozen = draw.randint(5, 60), draw.random() < 0.5

    @override
    def model(self) -> nn.Module:
        return Stack(self.words, self.widths, frozen=self.frozen)

    @override
    def data(self) -> Any:
        return torch.utils.data.TensorDataset(torch.arange(40).view(8, 5) % self.words)

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).float().square().mean()


class Stack(nn.Module):
    """Layers in a row, the first of them frozen or not."""

    def __init__(self, words: int, widths: list[int], *, frozen: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(words, widths[0])
        pairs = zip(widths, [*widths[1:], widths[0]], strict=True)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(a), nn.Linear(a, b, bias=bool(b % 2)), nn.GELU()) for a, b in pairs
        )
        self.head = nn.Linear(widths[0], words, bias=False)
        self.head.weight = self.words.weight
        if frozen:
            self.layers[0].requires_grad_(requires_grad=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
