"""A model whose shapes are drawn at random, to be planned and to be trained under a library without peers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar import Task

LEAST, MOST = 9, 40
"""Widths: the smallest tensor has more bytes than the scalars that an engine makes of a loss."""


class LibraryShapes(Task):
    """Layers of any widths: with an embedding or without, tied or not, some of them frozen, some unused."""

    def __init__(self, seed: int, wide: int = 1) -> None:
        draw = random.Random(seed)
        self.width = wide * draw.randint(LEAST, MOST)
        self.inner = [wide * draw.randint(LEAST, MOST) for _ in range(draw.randint(1, 4))]
        self.words = draw.choice([0, wide * draw.randint(LEAST, MOST)])
        self.is_tied = draw.random() < 0.5
        self.frozen = [part for part in ("words", "first", "last", "gain") if draw.random() < 0.25]
        self.is_unused = draw.random() < 0.3
        self.has_buffer = draw.random() < 0.5

    @override
    def model(self) -> nn.Module:
        return Layers(self)

    @override
    def blocks(self, model: nn.Module) -> Sequence[str]:
        return [f"layers.{number}" for number in range(len(self.inner))]

    @override
    def data(self) -> Any:
        shape, values = ((12, 4), self.words) if self.words else ((12, 4, self.width), 2)
        return torch.utils.data.TensorDataset(torch.randint(values, shape))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(batch[0]).float().square().mean()


class Layer(nn.Module):
    """Matrices and vectors of different sizes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, inner, bias=bool(inner % 2))
        self.down = nn.Linear(inner, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x * self.scale).relu())


class Layers(nn.Module):
    """Layers in a row, which are blocks, and what is around them."""

    def __init__(self, task: LibraryShapes) -> None:
        super().__init__()
        if task.words:
            self.words = nn.Embedding(task.words, task.width)
        self.layers = nn.ModuleList(Layer(task.width, inner) for inner in task.inner)
        self.gain = nn.Parameter(torch.ones(task.width))
        self.head = nn.Linear(task.width, task.words or LEAST, bias=False)
        if task.words and task.is_tied:
            self.head.weight = self.words.weight
        if task.is_unused:
            self.unused = nn.Linear(3, 3, bias=False)  # a matrix that is smaller than vectors
        self.shift: Tensor | None
        self.register_buffer("shift", torch.zeros(task.width) if task.has_buffer else None)
        chosen = {"words": [self.words] if task.words else [], "first": [self.layers[0]], "last": [self.layers[-1]]}
        for part in task.frozen:
            for module in chosen.get(part, []):
                module.requires_grad_(False)
        if "gain" in task.frozen:
            self.gain.requires_grad_(False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) if hasattr(self, "words") else x.to(self.gain.dtype)
        for layer in self.layers:
            x = layer(x)
        if self.shift is not None:
            x = x + self.shift
        return self.head(x * self.gain)
