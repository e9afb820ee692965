"""A small GPT whose blocks a mesh can split, with what trips a mesh: dropout, tied weights, BatchNorm, a skip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar

V, T = 23, 8


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, *, batch_norm: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.statistics = nn.BatchNorm1d(width) if batch_norm else None

    @override
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        if other is not None:
            x = x + other
        return x if self.statistics is None else self.statistics(x.transpose(1, 2)).transpose(1, 2)


class Stack(nn.Module):
    def __init__(self, *, width: int, dropout: float, tied: bool, batch_norm: bool, skip: bool) -> None:
        super().__init__()
        self.token, self.skip = nn.Embedding(V, width), skip
        self.blocks = nn.ModuleList(Block(width, dropout, batch_norm=batch_norm) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, V, bias=False)
        if tied:
            self.head.weight = self.token.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        kept: Tensor | None = None
        for i, block in enumerate(self.blocks):
            x = block(x, kept if i == 3 else None)
            kept = x if i == 0 and self.skip else kept
        return self.head(self.norm(x))


class Stacked(unipar.Task):
    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {"width": 16, "dropout": 0.0, "tied": False, "batch_norm": False, "skip": False}
        self.settings = {**defaults, **settings}

    @override
    def model(self) -> nn.Module:
        return Stack(**self.settings)

    @override
    def cuts(self, stages: int) -> Sequence[str] | None:
        """Stages of equally many blocks, whatever time they take; with a skip, where it allows one."""
        return None if self.settings["skip"] else [f"blocks.{4 * stage // stages}" for stage in range(1, stages)]

    @override
    def data(self) -> TensorDataset:
        tokens = torch.randint(0, V, (64, T + 1), generator=torch.Generator().manual_seed(3))
        tokens[:, 2::2] = (tokens[:, 1::2] * 5 + 2) % V
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    @override
    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Counting(Stacked):
    """A model that keeps a number of its own, which no checkpoint holds."""

    @override
    def model(self) -> nn.Module:
        made: Any = super().model()
        made.calls = 0
        return made

    @override
    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.calls += 1
        return super().loss(model, batch)
