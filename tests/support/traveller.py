"""A task with all that an exported script takes along: dropout, weights, a collate of its own, frozen parameters."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

import unipar

Words = tuple[Tensor, Tensor]


class Texts20(unipar.Task):
    """20 short texts of 1 to 5 numbers: batches of 8 leave 4 over, and each batch has another number of words."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        self.width, self.dropout = width, dropout
        self.prepared = False

    @override
    def prepare(self) -> None:
        self.prepared = True

    @override
    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(7, self.width), *layers, nn.Dropout(self.dropout), nn.Linear(self.width, 7))
        model[1].requires_grad_(requires_grad=False)
        return model

    @override
    def data(self) -> Any:
        return [torch.arange(i, i + 1 + i % 5) % 7 for i in range(20)]

    @override
    def collate(self, samples: list[Tensor]) -> Words:
        longest = max(len(s) for s in samples)
        words = torch.stack([F.pad(s, (0, longest - len(s)), value=-1) for s in samples])
        return words.clamp(min=0), torch.where(words < 0, -100, (words + random.choice([0, 1])) % 7)

    @override
    def loss(self, model: nn.Module, batch: Words) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    @override
    def groups(self, model: nn.Module) -> list[Mapping[str, Any]]:
        one, *others = [p for p in model.parameters() if p.requires_grad]
        return [{"params": [one], "lr": 0.05}, {"params": (p for p in others)}]


class Words20(Texts20):
    """Each word counts the same; the model arrives in eval mode, as from_pretrained returns it."""

    @override
    def model(self) -> nn.Module:
        return super().model().eval()

    @override
    def weight(self, batch: Words) -> Tensor:
        return (batch[1] >= 0).sum()


class Line(unipar.Task):
    """A line through 21 points, read by a DataLoader, with noise drawn at each reading."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    @override
    def data(self) -> Any:
        return DataLoader(Points(), shuffle=True)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])


SCALE = [1.0]


def doubled(worker: int) -> None:
    SCALE[0] = 2.0


class Loaded(Line):
    """The same, by workers that scale what they read."""

    @override
    def data(self) -> Any:
        return DataLoader(Points(), num_workers=1, worker_init_fn=doubled, timeout=60, prefetch_factor=3)


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 21

    @override
    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(-1, 1, 84).reshape(21, 4)[index]
        return SCALE[0] * x + 0.1 * torch.rand(4), x.sum().reshape(1)


if __name__ == "__main__":
    print(unipar.launch(sys.argv[1], task=Line))


class Counted20(Texts20):
    """The same in batches by tokens, whose numbers do not depend on their cut into microbatches."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width, dropout=0.0)

    @override
    def length(self, sample: Tensor) -> int:
        return len(sample)

    @override
    def collate(self, samples: list[Tensor]) -> Words:
        longest = max(len(s) for s in samples)
        words = torch.stack([F.pad(s, (0, longest - len(s)), value=-1) for s in samples])
        return words.clamp(min=0), torch.where(words < 0, -100, (words + 1) % 7)
