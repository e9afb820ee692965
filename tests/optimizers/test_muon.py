"""Muon beside torch.optim.Muon, and what it leaves to AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.optimizers.muon import Muon, orthogonalize, rate_factor


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4))


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_matrices_go_as_under_torchs_muon(rule: str) -> None:
    """In bf16 matrices are torch.optim.Muon's, but for roundings, and everything else is AdamW's."""
    model: Any = _model()
    other = _model()
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    ours = Muon(model.parameters(), adjust_lr=rule, ns_precision="bf16", **settings)
    matrices, rest = ([p for p in other.parameters() if (p.ndim == 2) is whole] for whole in (True, False))
    _train(model, ours)
    _train(other, torch.optim.Muon(matrices, adjust_lr_fn=rule, **settings), torch.optim.AdamW(rest, **settings))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4, rtol=0)
    assert ours.state[model[0].weight].keys() == {"momentum_buffer"}
    assert ours.state[model[0].bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_full_precision_is_that_of_the_gradients() -> None:
    """In fp64 the steps round a thousand million times less than in fp32: singular values are the same polynomial's."""
    matrix = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = orthogonalize(matrix, (3.4445, -4.775, 2.0315), steps=5, eps=1e-7)
    values = torch.linalg.svdvals(matrix) / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    assert torch.allclose(torch.linalg.svdvals(got).sort()[0], values.sort()[0], atol=1e-12)
    assert torch.equal(orthogonalize(matrix.T, (3.4445, -4.775, 2.0315), steps=5, eps=1e-7), got.T)


def test_factor_of_the_rate() -> None:
    """By the larger side, as Moonshot has it, or by the root of rows over columns, at least 1."""
    assert rate_factor("match_rms_adamw", 4, 100) == pytest.approx(2.0)
    assert rate_factor("original", 16, 4) == 2.0
    assert rate_factor("original", 4, 16) == 1.0


def test_a_group_can_leave_its_matrices_to_adamw() -> None:
    """`matrices: False` in a group."""
    model: Any = _model()
    optimizer = Muon([{"params": model[0].parameters(), "matrices": False}, {"params": model[2].parameters()}], lr=0.1)
    optimizer.separate([model[0].weight, model[2].weight])
    assert [(g["matrices"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups] == [
        (False, [(10, 6), (10,)]),
        (True, [(4, 10)]),
        (False, [(4,)]),
    ]
