"""A world's facts that need no peers."""

from __future__ import annotations

import pytest
import torch

from unipar.distributed.mesh import Mesh
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


def test_ranks_with_the_same_part_of_the_batch_count_once() -> None:
    """The one that leads counts; a world begins with a part for each rank."""
    world = World(Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar"), torch.device("cpu"), None)
    assert (world.data_rank, world.data_size, world.leads) == (0, 1, True)
    assert world.sum_over_data(torch.tensor([3.0, 4.0])).tolist() == [3.0, 4.0]
    world.leads = False
    assert world.sum_over_data(torch.tensor([3.0, 4.0])).tolist() == [0.0, 0.0]
    world.close_without_peers()


def test_seats_in_a_mesh() -> None:
    """Twelve ranks: two stages of three parts of the data, each trained by two ranks that split matrices."""
    seats: list[tuple[int, int, bool]] = []
    for rank in range(12):
        place = Place(rank=rank, size=12, local_rank=rank, local_size=12, launcher="unipar")
        world = World(place, torch.device("cpu"), None)
        world.lay(tensor=2, pipeline=2)
        seats.append((world.data_rank, world.data_size, world.leads))
        world.close_without_peers()
    first = [(share, 3, False) for share in (0, 0, 1, 1, 2, 2)]
    last = [(share, 3, leads) for share in (0, 1, 2) for leads in (True, False)]
    assert seats == first + last


def test_rank_with_other_seats() -> None:
    """Eight ranks, 2 x 2 x 2: the rank of the same seat in another stage, and of the first seat in this stage."""
    mesh = Mesh.of(5, 8, tensor=2, pipeline=2)
    assert mesh.seat == {"pipeline": 1, "data": 0, "context": 0, "tensor": 1}
    assert (mesh.rank_at(pipeline=0), mesh.rank_at(data=0, tensor=0), mesh.rank_at()) == (1, 4, 5)
