"""Character GPT on the sources of Python's standard library: `unipar run configs/char_gpt.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sys
import sysconfig
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unipar

Codes = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.token.weight  # tied: a character is read and written by the same numbers

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.place(torch.arange(codes.shape[1], device=codes.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class CharGPT(unipar.Task):
    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 64) -> None:
        self.sizes, self.context = (layers, width, heads, context), context

    @cached_property
    def text(self) -> str:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return "".join(f.read_text("utf-8", "replace") for f in files)[:1_000_000]

    def windows(self, part: slice) -> TensorDataset:
        """Return samples of `context` characters and, for each of them, the one that follows."""
        code = {character: i for i, character in enumerate(sorted(set(self.text)))}
        codes = torch.tensor([code[character] for character in self.text[part]])
        windows = codes.unfold(0, self.context + 1, self.context)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def model(self) -> nn.Module:
        return GPT(len(set(self.text)), *self.sizes)

    def data(self) -> TensorDataset:
        return self.windows(slice(0, 900_000))

    def validation(self) -> TensorDataset:
        return self.windows(slice(900_000, None))

    def loss(self, model: nn.Module, batch: Codes) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def metrics(self, model: nn.Module, batch: Codes) -> dict[str, Tensor]:
        right = model(batch[0]).argmax(-1) == batch[1]
        return {"loss": self.loss(model, batch), "accuracy": right.float().mean()}


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "char_gpt.yaml"
    print(unipar.launch(config, task=CharGPT, overwrite="--overwrite" in sys.argv))
