"""A task with an embedding and a tied head, which ranks can split over the words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar

WORDS, WIDTH = 32, 16


class WordModel(nn.Module):
    """Two blocks of two matrices between an embedding and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    @override
    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Words(unipar.Task):
    """Each word from the one before it."""

    @override
    def model(self) -> nn.Module:
        return WordModel()

    @override
    def data(self) -> Any:
        return TensorDataset(torch.randint(0, WORDS, (64, 9), generator=Generator().manual_seed(0)))

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (words,) = batch
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
