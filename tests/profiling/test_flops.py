"""Operations of a step: those of forward and backward, the same whether or not something is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from unipar.profiling.flops import FlopCounter


class Chain(nn.Module):
    """Three matrices of 8 x 8, and attention among four positions after each if `attends`."""

    def __init__(self, *, reentrant: bool | None = None, attends: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.reentrant, self.attends = reentrant, attends

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        if not self.attends:
            return y
        q = y.view(-1, 4, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.reentrant)
        return x


ATTENTION = 3 * 2 * 6 * 2 * 4 * 4 * 4
"""Operations of three layers of two heads: six products, two in forward and four in backward."""


def counted(model: nn.Module, batch: Tensor, counter: FlopCounter | None = None) -> FlopCounter:
    counter = counter or FlopCounter()

    def loss(model: Any, given: Any, number: int) -> Tensor:
        return model(given).square().mean()

    with counter:
        counter.watched(loss)(model, batch, 0).backward()
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))  # neither in the loss nor in backward, as in an optimizer
    return counter


@pytest.mark.parametrize(
    ("reentrant", "attends", "again"), [(None, False, 0), (False, True, 3072), (True, False, 1536)]
)
def test_what_is_computed_again_is_apart(*, reentrant: bool | None, attends: bool, again: int) -> None:
    """Four rows through three matrices: 512 operations each in forward, twice that in backward, wherever it runs.

    Three blocks of a product and attention, whose backward needs its result, are 6 x 512 operations again.
    """
    x = torch.ones(4, 8, requires_grad=True)
    found = counted(Chain(reentrant=reentrant, attends=attends), x)
    assert found.flops == 3 * 512 * 3 + attends * ATTENTION
    if reentrant is None:
        with FlopCounterMode(display=False) as official:
            Chain()(x).square().mean().backward()
        assert official.get_total_flops() == found.flops
    assert found.recomputed == again


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_attention_counts_alike_under_every_kernel(kernel: SDPBackend) -> None:
    """Two products of 2 x 4 x 4 x 4 in forward and four in backward, in each head: scores computed again are not."""
    with sdpa_kernel(kernel):
        found = counted(Chain(attends=True), torch.ones(4, 8))
    assert found.flops == 3 * 512 * 3 - 512 + ATTENTION


def twice(x: Tensor) -> Tensor:
    return 2 * x


def test_operations_that_cannot_be_counted_are_named() -> None:
    """A fused recurrent kernel has no formula, and an operation from outside of torch is unknown."""
    with torch.library._scoped_library("stranger", "DEF") as library:  # pyright: ignore[reportPrivateUsage]
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", twice, "CompositeExplicitAutograd")
        counter = FlopCounter()
        with counter:
            run = counter.watched(lambda model, given, _: torch.ops.stranger.twice(model(given)[0]))
            run(nn.LSTM(4, 4), torch.ones(2, 1, 4), 0)
    assert list(counter.uncounted) == ["mkldnn_rnn_layer"]
    assert list(counter.unknown) == ["stranger::twice"]
