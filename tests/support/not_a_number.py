"""The character GPT, whose loss on rank 1 is no number at one step."""

from __future__ import annotations

import math
import os
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from examples.char_gpt import CharGPT


class Poisoned(CharGPT):
    """CharGPT with a loss that is NaN on rank 1 at step `step`, which it counts by calls in training."""

    def __init__(self, step: int, **args: Any) -> None:
        super().__init__(**args)
        self._step, self._calls = step, 0

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        value = super().loss(model, batch)
        self._calls += bool(model.training)
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        return value * math.nan if rank == 1 and self._calls == self._step else value
