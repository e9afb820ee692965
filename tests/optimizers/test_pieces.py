"""Updates in pieces: tensors that are not contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.optimizers.adamw_8bit import AdamW8bit
from unipar.optimizers.adamw_bf16 import AdamWBf16


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_a_weight_that_is_not_contiguous(kind: Any) -> None:
    """Its update is the same as that of its copy that is."""
    torch.manual_seed(0)
    start, gradient = torch.randn(16, 16, 4, 4), torch.randn(16, 16, 4, 4)
    found: list[torch.Tensor] = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone().contiguous(memory_format=layout))
        optimizer = kind([p], lr=0.02, weight_decay=0.1)
        for _ in range(2):
            p.grad = gradient.clone().contiguous(memory_format=layout)
            optimizer.step()
        found.append(p.detach().contiguous())
    assert torch.equal(*found)
