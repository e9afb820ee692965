"""ViT of transformers on digits that are distorted at random: `unipar run configs/vit.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from digits import Digits, Images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

import unipar


def distorted(image: Tensor) -> Tensor:
    """Return an image turned by up to 15 degrees, scaled and moved by up to a tenth, with a small square erased.

    It draws from PyTorch's generator, which unipar seeds by epoch and sample: each world sees the same images.
    """
    angle, scale, dx, dy = ((2 * torch.rand(4) - 1) * torch.tensor([math.radians(15), 0.1, 0.2, 0.2])).tolist()
    cos, sin = math.cos(angle) / (1 + scale), math.sin(angle) / (1 + scale)
    grid = F.affine_grid(torch.tensor([[[cos, -sin, dx], [sin, cos, dy]]]), [1, *image.shape], align_corners=False)
    image = F.grid_sample(image[None], grid, align_corners=False)[0]
    side = image.shape[-1] // 4
    row, column = torch.randint(image.shape[-1] - side + 1, (2,)).tolist()
    image[:, row : row + side, column : column + side] = 0
    return image


class Distorted(Dataset[tuple[Tensor, Tensor]]):
    """Images of `size` x `size` pixels; the training's are other ones in each epoch."""

    def __init__(self, images: Any, size: int, *, distort: bool) -> None:
        self.images, self.size, self.distort = images, size, distort

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        image = F.interpolate(image[None], self.size, mode="bilinear")[0]
        return (distorted(image) if self.distort else image), label


class ViT(Digits):
    def __init__(self, size: int = 16, patch: int = 4, hidden: int = 64, layers: int = 4, heads: int = 4) -> None:
        self.size = size
        self.sizes: dict[str, Any] = {
            "image_size": size,
            "patch_size": patch,
            "num_channels": 1,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_labels": 10,
        }

    def model(self) -> nn.Module:
        return ViTForImageClassification(ViTConfig(**self.sizes))

    def data(self) -> Any:
        return Distorted(super().data(), self.size, distort=True)

    def validation(self) -> Any:
        return Distorted(super().validation(), self.size, distort=False)

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(pixel_values=images).logits, labels, label_smoothing=0.1)

    def metrics(self, model: nn.Module, batch: Images) -> dict[str, Tensor]:
        images, labels = batch
        guess = model(pixel_values=images).logits
        return {"loss": F.cross_entropy(guess, labels), "accuracy": (guess.argmax(-1) == labels).float().mean()}


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "vit.yaml"
    print(unipar.launch(config, task=ViT, overwrite="--overwrite" in sys.argv))
