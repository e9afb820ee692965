"""Diffusion transformer (DiT) on scikit-learn's digits, trained by flow matching; samples by the averaged weights."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from digits import Digits
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unipar

Noisy = tuple[Tensor, Tensor, Tensor, Tensor]


class Block(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.condition(condition)[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm(x) * (1 + a) + b).unflatten(-1, (3, self.heads, -1))
        seen = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        x = x + c * self.out(seen)
        return x + f * self.mlp(self.norm(x) * (1 + d) + e)


class DiT(nn.Module):
    def __init__(self, size: int = 8, patch: int = 2, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.fold, self.unfold = nn.Fold((size, size), patch, stride=patch), nn.Unfold(patch, stride=patch)
        self.enter, self.leave = nn.Linear(patch**2, width), nn.Linear(width, patch**2)
        self.places = nn.Parameter(0.1 * torch.randn((size // patch) ** 2, width))
        self.labels, self.time = nn.Embedding(10, width), nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        waves = time[:, None] * torch.logspace(0, 3, 32, dtype=time.dtype, device=time.device)
        condition = self.time(torch.cat([waves.sin(), waves.cos()], -1)) + self.labels(labels)
        x = self.enter(self.unfold(images).transpose(1, 2)) + self.places
        for block in self.blocks:
            x = block(x, condition)
        return self.fold(self.leave(x).transpose(1, 2))


class WithNoise(Dataset[Noisy]):
    """Image, noise, time and label: unipar seeds what is drawn by epoch and sample, so each world sees the same."""

    def __init__(self, images: Any, size: int) -> None:
        self.images, self.size = images, size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Noisy:
        image, label = self.images[index]
        image = 2 * F.interpolate(image[None], self.size, mode="bilinear")[0] - 1
        return image, torch.randn(image.shape), torch.rand(()), label


class Diffusion(unipar.Task):
    def __init__(self, size: int = 8, **sizes: int) -> None:
        self.size, self.sizes = size, sizes

    def model(self) -> nn.Module:
        return DiT(self.size, **self.sizes)

    def data(self) -> WithNoise:
        return WithNoise(Digits().data(), self.size)

    def validation(self) -> WithNoise:
        return WithNoise(Digits().validation(), self.size)

    def loss(self, model: nn.Module, batch: Noisy) -> Tensor:
        """Return how far the model is from the direction in which the noise lies."""
        image, noise, time, labels = batch
        return F.mse_loss(model(torch.lerp(image, noise, time[:, None, None, None]), time, labels), noise - image)

    def train(self, run: unipar.Run) -> None:
        super().train(run)
        with run.averaged(), run.whole() as model:
            run.log(samples=self.samples(model, run.device))

    def samples(self, model: nn.Module, device: torch.device, rows: int = 4, steps: int = 32) -> Tensor:
        """Return a picture with some rows of ten digits, each drawn from noise in so many steps."""
        x = torch.randn(10 * rows, 1, self.size, self.size, generator=Generator().manual_seed(0)).to(device)
        for time in torch.arange(steps, 0, -1, device=device) / steps:
            x = x - model(x, time.expand(len(x)), torch.arange(10, device=device).repeat(rows)) / steps
        picture = x.view(rows, 10, self.size, self.size).transpose(1, 2).reshape(rows * self.size, -1)
        return (picture / 2 + 0.5).clamp(0, 1)


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "diffusion.yaml"
    print(unipar.launch(config, task=Diffusion, overwrite="--overwrite" in sys.argv))
