"""Image classifier on scikit-learn's 1,797 handwritten digits: `unipar run configs/digits.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unipar

Images = tuple[Tensor, Tensor]


class Digits(unipar.Task):
    def __init__(self, channels: int = 16) -> None:
        self.channels = channels

    def model(self) -> nn.Module:
        few, many = self.channels, 2 * self.channels
        return nn.Sequential(
            nn.Conv2d(1, few, 3, padding=1),
            nn.GroupNorm(4, few),  # not BatchNorm, whose mean would depend on how the batch is split
            nn.ReLU(),
            nn.Conv2d(few, many, 3, stride=2, padding=1),
            nn.GroupNorm(4, many),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(many * 4 * 4, 10),
        )

    def data(self) -> TensorDataset:
        return self.images(slice(0, 1500))

    def validation(self) -> TensorDataset:
        return self.images(slice(1500, None))

    def images(self, part: slice) -> TensorDataset:
        digits: Any = load_digits()  # its annotation is a union of two types
        pixels = torch.tensor(digits.images[part], dtype=torch.float32) / 16
        return TensorDataset(pixels.unsqueeze(1), torch.tensor(digits.target[part]))

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Images) -> dict[str, Tensor]:
        images, labels = batch
        guess = model(images)
        right = (guess.argmax(-1) == labels).float()
        return {"loss": F.cross_entropy(guess, labels), "accuracy": right.mean()}


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "digits.yaml"
    print(unipar.launch(config, task=Digits, overwrite="--overwrite" in sys.argv))
