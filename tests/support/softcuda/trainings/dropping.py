"""A character GPT with dropout inside its attention."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from examples.char_gpt import Block, CharGPT


class DroppingBlock(Block):
    """Drops a tenth of its attention's weights."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*split, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class DroppingGPT(CharGPT):
    """Its blocks draw random numbers inside attention."""

    @override
    def model(self) -> nn.Module:
        model = super().model()
        _, width, heads, _ = self.sizes
        model.layers = nn.ModuleList(DroppingBlock(width, heads) for _ in range(2))
        return model
