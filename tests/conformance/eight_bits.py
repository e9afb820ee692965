"""Moments of 8 bits for the conformance suite: blocks that are large enough, and torchao's own optimizer by hand."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from tests.conformance import tasks

WIDTH = 256
"""Width inside a block: its two matrices have 4,096 elements, the fewest that torchao keeps in 8 bits."""


class Wide(tasks.Grouped):
    @override
    def model(self) -> nn.Module:
        model: Any = super().model()
        for block in model.blocks:
            block.up, block.down = nn.Linear(tasks.D, WIDTH), nn.Linear(WIDTH, tasks.D)
        return model


def eight_bits_by_hand(groups: Any, **settings: Any) -> torch.optim.Optimizer:
    """torchao's optimizer as it is, but for its compiler, and with a rate that may be set as a number."""
    from torchao.optim import AdamW8bit  # takes seconds, and is not everywhere

    @final
    class EightBits(AdamW8bit):
        @override
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return EightBits(groups, **settings)
