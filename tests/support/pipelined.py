"""A task whose pipeline is exported: dropout in blocks and between them, tied weights, texts with weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

import unipar


class Layer(nn.Module):
    """Residual layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    @override
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(self.norm(x))), 0.1, self.training) * mask


class Tied(nn.Module):
    """Four layers between an embedding and a head of the same weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.head = nn.Linear(width, 7)
        self.head.weight = self.embedding.weight

    @override
    def forward(self, words: Tensor) -> Tensor:
        x, mask = F.dropout(self.embedding(words), 0.1, self.training), (words > 0).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(F.dropout(x, 0.1, self.training))


class Texts(unipar.Task):
    """20 short texts of 1 to 5 numbers: batches of 8 leave 4 over, and each batch has another number of words."""

    def __init__(self, width: int = 16) -> None:
        self.width = width

    @override
    def model(self) -> nn.Module:
        return Tied(self.width)

    @override
    def data(self) -> Any:
        return [torch.arange(i, i + 1 + i % 5) % 7 for i in range(20)]

    @override
    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        longest = max(len(s) for s in samples)
        words = torch.stack([F.pad(s, (0, longest - len(s)), value=-1) for s in samples])
        return words.clamp(min=0), torch.where(words < 0, -100, (words + 1) % 7)

    @override
    def weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] >= 0).sum()

    @override
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Lines(Texts):
    """20 texts, padded to one length in each 8 that follow one another, and to another in the next 8."""

    @override
    def data(self) -> Any:
        return [F.pad(text, (0, 5 + i // 8 - len(text)), value=-1) for i, text in enumerate(super().data())]


class Own(Lines):
    """The same, with groups and cuts of its own: a tied matrix, the last layer, and the rest, each at its own rate."""

    def __init__(self, width: int = 16, second: int = 1) -> None:
        super().__init__(width)
        self.second = second

    @override
    def groups(self, model: Any) -> list[dict[str, Any]]:
        last = [*model.layers[3].parameters()]
        apart = {id(p) for p in (model.embedding.weight, *last)}
        return [
            {"params": model.embedding.weight, "lr": 0.05},
            {"params": last, "weight_decay": 0.0},
            {"params": (p for p in model.parameters() if id(p) not in apart), "lr": 0.02},
        ]

    @override
    def cuts(self, stages: int) -> list[str]:
        return [f"layers.{number}" for number in range(self.second, stages)]


class Skewed(Texts):
    """Texts of other lengths on the second share of the data than on the first, which change at other steps."""

    @override
    def data(self) -> Any:
        drawn = torch.Generator().manual_seed(0)
        return [torch.randint(1, 7, (10 + (i // 8) * (i % 4 // 2),), generator=drawn) for i in range(32)]
