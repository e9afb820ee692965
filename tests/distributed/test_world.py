"""A world's facts that need no peers."""

from __future__ import annotations

import pytest
import torch

from unipar.distributed.place import Place
from unipar.distributed.world import World


@pytest.mark.parametrize(("device", "index"), [("cpu", 1), ("cuda:1", 1), ("cuda:0", 0)])
def test_two_ranks_may_share_a_gpu(device: str, index: int) -> None:
    """Libraries take LOCAL_RANK as the index of their GPU: rank 1 of two on `device: cuda:0` has none of its own."""
    world = World(Place(rank=1, size=2, local_rank=1, local_size=2, launcher="unipar"), torch.device(device), None)
    try:
        assert world.local_rank_for_libraries == index
    finally:
        world.close_without_peers()
