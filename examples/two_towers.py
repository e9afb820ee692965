"""Two towers, pictures and captions, by a contrastive loss: `unipar run configs/two_towers.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unipar

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1)}
WORDS = (*COLOURS, "square", "disc", "cross", "ring", "top", "middle", "bottom", "left", "centre", "right")
KINDS, SIDE = (5, 4, 3, 3), 16  # numbers of colours, shapes, rows and columns; pixels of a side


def draw(count: int, seed: int) -> TensorDataset:
    """Return pictures and captions such as "red ring top left": pixels, words, and which of 180 captions it is."""
    g = torch.Generator().manual_seed(seed)
    colour, shape, row, column = (torch.randint(n, (count,), generator=g) for n in KINDS)
    centres = torch.stack([row, column]) * 5.0 + 2.5 + torch.rand(2, count, generator=g)
    grid = torch.arange(SIDE)
    down, right = (grid - centres[0, :, None]).abs()[:, :, None], (grid - centres[1, :, None]).abs()[:, None, :]
    distance, farthest = (down**2 + right**2).sqrt(), torch.maximum(down, right)
    cross = (torch.minimum(down, right) < 0.8) & (farthest < 2.5)
    masks = torch.stack([farthest < 2.2, distance < 2.5, cross, (distance - 2.2).abs() < 0.7])
    mask = masks[shape, torch.arange(count)].float()
    images = mask[:, None] * torch.tensor(list(COLOURS.values())).float()[colour][:, :, None, None]
    images += 0.2 * torch.randn(images.shape, generator=g)
    words = torch.stack([colour, shape, row, column], 1) + torch.tensor([0, *KINDS[:-1]]).cumsum(0)
    captions = ((colour * 4 + shape) * 3 + row) * 3 + column
    return TensorDataset(images, words, captions)


class Towers(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, 1), nn.GELU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GELU(), nn.Flatten(),
            nn.Linear(2 * channels * (SIDE // 4) ** 2, width),
        )  # fmt: skip
        self.words = nn.Embedding(len(WORDS), width)
        self.texts = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.sharpness = nn.Parameter(torch.full((1,), 2.0))


class TwoTowers(unipar.Task):
    def __init__(self, channels: int = 16, width: int = 64, samples: int = 4096) -> None:
        self.sizes, self.samples = (channels, width), samples

    def model(self) -> Towers:
        return Towers(*self.sizes)

    def data(self) -> TensorDataset:
        return draw(self.samples, seed=1)

    def validation(self) -> TensorDataset:
        return draw(300, seed=2)

    def features(self, model: Any, batch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row for each sample; the trained temperature is in those of the texts."""
        pictures, words, captions = batch
        images = F.normalize(model.images(pictures), dim=-1)
        texts = F.normalize(model.texts(model.words(words).mean(1)), dim=-1)
        return images, texts * model.sharpness.exp(), captions

    def loss_across(self, features: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return InfoNCE over all pairs of the global batch, in both directions; equal captions are right as well."""
        images, texts, captions = features
        right = (captions[:, None] == captions).float()
        likely, logits = right / right.sum(1, keepdim=True), images @ texts.T
        return (F.cross_entropy(logits, likely) + F.cross_entropy(logits.T, likely)) / 2

    def metrics(self, model: Any, batch: list[Tensor]) -> dict[str, Any]:
        return {"found": unipar.gathered(*self.features(model, batch), score=found)}


def found(images: Tensor, texts: Tensor, captions: Tensor) -> float:
    """Return the share of pictures whose nearest text, of all validation samples, is a right one."""
    nearest = (images @ texts.T).argmax(1)
    return float((captions[nearest] == captions).float().mean())


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "two_towers.yaml"
    print(unipar.launch(config, task=TwoTowers, overwrite="--overwrite" in sys.argv))
