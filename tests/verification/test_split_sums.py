"""Matrix products in parts: other roundings, the same numbers, in forward, backward and recomputed blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from unipar.verification.worker.split_sums import sums_in_parts


class Transposed(nn.Module):
    """A linear layer as GPT-2 has it: its weight is transposed."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(rows, columns) / 8), nn.Parameter(torch.randn(columns))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.fused, self.out = Transposed(48, 144), nn.Linear(48, 48)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(self.encoder(x)).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def gradients(model: nn.Module, x: Tensor, call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    call(x).square().sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (3, 1), (1, 2), (5, 2)])
def test_products_in_parts_are_the_same_but_for_rounding(tensor: int, context: int) -> None:
    """Gradients differ in the last places of fp64, and do differ; sizes need not be multiples of the parts."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(3, 7, 48, dtype=torch.float64)
    whole = gradients(model, x, model)
    with sums_in_parts(tensor, context):
        parts = gradients(model, x, model)
    off = {name: float((parts[name] - g).norm() / g.norm()) for name, g in whole.items() if "in_proj_b" not in name}
    assert max(off.values()) < 1e-13
    assert min(off["out.weight"], off["fused.weight"], off["encoder.self_attn.in_proj_weight"]) > 0


def test_a_recomputed_block_is_cut_alike() -> None:
    """The forward that is run again in the backward has the same bits, so gradients have them too."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 7, 48)
    with sums_in_parts(2, 2):
        once = gradients(model, x, model)
        again = gradients(model, x, partial(checkpoint, model, use_reentrant=False))
    assert all(torch.equal(once[name], g) for name, g in again.items())


def test_one_part_changes_nothing() -> None:
    """Without a cut no bit changes."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 7, 48)
    whole = gradients(model, x, model)
    with sums_in_parts(1, 1):
        parts = gradients(model, x, model)
    assert all(torch.equal(whole[name], g) for name, g in parts.items())
