"""Placement of a module's tensors: each parameter once, wherever modules keep it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unipar.engines.placement import place_tensors


def test_a_recurrent_layers_list_of_its_parameters() -> None:
    """GRU, LSTM and RNN keep a list of their parameters up to date as these are set; none is placed a second time."""
    layer: Any = nn.GRU(2, 3)
    placed: list[Tensor] = []

    def place(p: Tensor) -> Tensor:
        placed.append(p)
        return p.detach().clone()

    before = list(layer.parameters())
    place_tensors(layer, place, torch.device("cpu"))
    assert len(placed) == len(before) == 4
    assert all(one is other for one, other in zip(placed, before, strict=True))
    assert all(one is other for one, other in zip(layer._flat_weights, layer.parameters(), strict=True))
