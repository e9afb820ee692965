"""Size of a checkpoint from shapes alone, beside tensors that have values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from unipar.model.saved_size import saved_bytes


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(False))


def test_bytes_of_weights_buffers_and_states() -> None:
    """12 trained numbers and 3 frozen; 4 running means and a count; two moments and a count for each of 4 weights."""

    def adam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in model.named_parameters() if p.requires_grad])

    assert saved_bytes(_model(), adam, fp64=False) == (12 + 3) * 4 + 4 * 4 + 8 + 2 * 12 * 4 + 4 * 4
    assert saved_bytes(_model(), adam, fp64=True) == (12 + 3) * 8 + 4 * 8 + 8 + 2 * 12 * 8 + 4 * 4
    with torch.device("meta"):
        assert saved_bytes(_model(), adam, fp64=False) == 196


def test_an_optimizer_that_needs_values() -> None:
    """A size that cannot be told: what the optimizer reads is not there."""

    class Reads(torch.optim.SGD):
        @override
        def step(self, closure: Any = None) -> Any:
            return float(self.param_groups[0]["params"][0].sum())

    assert saved_bytes(_model(), lambda model: Reads([p for _, p in model.named_parameters()], 0.1), fp64=False) is None
