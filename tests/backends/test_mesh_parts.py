"""Runtime file of exported scripts: parts of a sequence over ranks, which are threads here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from unipar_mesh.scripts.block_check import ThreadExchange
from unipar_mesh.scripts.mesh_parts import Positions, Ranks


def on_each_rank(length: int, dim: int, ranks: int = 3) -> list[tuple[list[int], Tensor, Tensor, Tensor | None]]:
    """Return what each rank has: the counts, its part joined again, its part of a sum, and a gradient."""
    exchange = ThreadExchange(ranks)
    shape = [2, 2, 2]
    shape[dim] = length

    def run(rank: int) -> tuple[list[int], Tensor, Tensor, Tensor | None]:
        positions = Positions(Ranks(rank, exchange), length)
        whole = torch.arange(4.0 * length).view(shape).requires_grad_()
        joined = positions.gather(positions.own(whole, dim), dim)
        (joined * (rank + 1)).sum().backward()
        return positions.counts, joined.detach(), positions.add(whole.detach() * rank, dim), whole.grad

    results = exchange.run(run)
    assert isinstance(results, list), results
    return results


@pytest.mark.parametrize(
    ("length", "dim", "counts"), [(6, 1, [2, 2, 2]), (7, 1, [3, 2, 2]), (2, 1, [1, 1, 0]), (5, 0, [2, 2, 1])]
)
def test_positions_of_ranks(length: int, dim: int, counts: list[int]) -> None:
    """Of any length and along any dimension: parts are joined to the whole, and sums and gradients are of all ranks."""
    results = on_each_rank(length, dim)
    shape = [2, 2, 2]
    shape[dim] = length
    whole = torch.arange(4.0 * length).view(shape)
    first = [sum(counts[:rank]) for rank in range(3)]
    for rank, (found, joined, added, gradient) in enumerate(results):
        own = whole.narrow(dim, first[rank], counts[rank])
        assert found == counts
        assert torch.equal(joined, whole)
        assert torch.equal(added, own * (0 + 1 + 2))
        expected = torch.zeros(shape)
        expected.narrow(dim, first[rank], counts[rank]).fill_(1.0 + 2.0 + 3.0)
        assert gradient is not None
        assert torch.equal(gradient, expected)
