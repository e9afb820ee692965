"""Task that trains a part of the character GPT."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from examples.char_gpt import CharGPT


class Tuned(CharGPT):
    """The character GPT with frozen attention and embeddings."""

    @override
    def model(self) -> nn.Module:
        made = super().model()
        for name, p in made.named_parameters():
            p.requires_grad_("mlp" in name or "norm" in name)
        return made
