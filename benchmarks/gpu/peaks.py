"""The quickstart's task, which also writes down the highest number of bytes that torch has allocated on the GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from examples.char_gpt import CharGPT


class PeakGPT(CharGPT):
    """Character GPT; at each loss a rank writes `torch.cuda.max_memory_allocated` into a file of `folder`."""

    def __init__(self, folder: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.folder = Path(folder)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        device = batch[0].device
        if device.type == "cuda":
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            text = json.dumps(torch.cuda.max_memory_allocated(device))
            (self.folder / f"peak-{rank}.json").write_text(text, encoding="utf-8")
        return super().loss(model, batch)
