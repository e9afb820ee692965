"""Diffusion transformer (DiT) on scikit-learn's digits, by flow matching: `unipar run configs/diffusion.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
from digits import Digits
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unipar


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
        x = x + c * self.out(F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2))
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


class WithNoise(TensorDataset):
    """Image, noise, time and label: unipar seeds what is drawn by epoch and sample, so each world sees the same."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        return image, torch.randn(image.shape), torch.rand(()), label


class Diffusion(unipar.Task):
    def __init__(self, size: int = 8, **sizes: int) -> None:
        self.size, self.sizes = size, sizes

    def model(self) -> nn.Module:
        return DiT(self.size, **self.sizes)

    def data(self, digits: TensorDataset | None = None) -> WithNoise:
        images, labels = (digits or Digits().data()).tensors
        return WithNoise(2 * F.interpolate(images, self.size, mode="bilinear") - 1, labels)

    def validation(self) -> WithNoise:
        return self.data(Digits().validation())

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
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
