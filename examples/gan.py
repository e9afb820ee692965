"""GAN on a ring of points, two models with an optimizer each: `unipar run configs/gan.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unipar

Batch = tuple[Tensor, Tensor]


class Ring(Dataset[Batch]):
    """Dataset of noise, which unipar seeds for each sample, and a point at a distance of about 1."""

    def __init__(self, count: int) -> None:
        angle = torch.arange(count) * (2 * math.pi / count)
        self.points = torch.stack([angle.cos(), angle.sin()], 1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Batch:
        return torch.randn(4), self.points[index] + 0.05 * torch.randn(2)


def network(inside: int, outside: int, width: int) -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(inside, width), nn.GELU(), *hidden, nn.Linear(width, outside))


def called(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


class Gan(unipar.Task):
    def __init__(self, width: int = 64, critic_steps: int = 2) -> None:
        self.width, self.critic_steps = width, critic_steps

    def model(self) -> dict[str, Any]:
        return {"generator": network(4, 2, self.width), "critic": network(2, 1, self.width)}

    def data(self) -> Ring:
        return Ring(4096)

    def validation(self) -> Ring:
        return Ring(512)

    def train(self, run: unipar.Run) -> None:
        self.run = run
        for local_batch in run.batches():
            run.step(local_batch, part="critic", loss=self.critic_loss)
            if (run.done + 1) % self.critic_steps == 0:
                run.step(local_batch, part="generator")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the generator's loss: the critic, which is frozen here, should take its points for real ones."""
        noise, _ = batch
        return F.softplus(-self.run.frozen("critic")(called, model(noise))).mean()

    def critic_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        noise, real = batch
        generated = self.run.frozen("generator")(called, noise)
        return (F.softplus(-model(real)) + F.softplus(model(generated))).mean()

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return how far the generator's points are from the ring, and the share of them on its right half."""
        points = model(batch[0])
        return {"off": (points.norm(dim=1) - 1).abs().mean(), "right": (points[:, 0] > 0).float().mean()}


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "gan.yaml"
    print(unipar.launch(config, task=Gan, overwrite="--overwrite" in sys.argv))
