"""Placement of a split model: which of a rank's parameters FSDP2 has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from unipar_mesh.placement_of_parts import Placement, place_model

from tests.support.expert_models import EXPERTS, Net
from unipar.distributed.mesh import Mesh, fake_groups

EXPERTS_OF_LAYERS = [f"layers.{i}.mixture.experts" for i in (0, 1)]


def sharded_names(mesh: Mesh, experts_over: int | None) -> set[str]:
    """Return the names of the parameters that FSDP2 has, with experts over so many ranks, or without it."""
    net: Any = Net("stacked", EXPERTS)
    with fake_groups(mesh) as groups:
        of_experts = None if experts_over is None else groups.copies_and_shards_of_experts(experts_over)
        placement = Placement(
            frozenset(),
            {},
            groups.copies_and_shards(mesh.sizes["data"]),
            ["layers.0", "layers.1"],
            EXPERTS_OF_LAYERS,
            of_experts,
            {},
        )
        place_model(net, placement, torch.device("cpu"))
        return {name for name, p in net.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize(("ranks", "over", "apart"), [(2, None, True), (4, 2, False)])
def test_experts_that_no_other_rank_trains(ranks: int, over: int | None, apart: bool) -> None:
    """They stay whole tensors, beside all else of their blocks; FSDP2 has those that several ranks train."""
    every = {name for name, _ in Net("stacked", EXPERTS).named_parameters()}
    experts = {f"{layer}.{name}" for layer in EXPERTS_OF_LAYERS for name in ("up", "down")}
    assert sharded_names(Mesh.of(0, ranks, expert=2), over) == (every - experts if apart else every)
