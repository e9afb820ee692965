"""Moments in an optimizer's state dict, by the names that the model has for its parameters."""

from __future__ import annotations

import torch
from torch import nn

from unipar.checkpoint.importing.found_state import ModelState, StateCollector
from unipar.checkpoint.importing.state_dicts import collect_optimizer


def test_names_that_begin_with_the_prefix_keep_their_moments() -> None:
    """Llama's `model.w` in a LightningModule's `model`: one `model.` is taken away from weights, none from moments."""
    into = StateCollector("there", ModelState({"model.w": [2]}, ["model.w"], {}, [], "float32"))
    into.learn_prefix(["model.model.w"])
    w = nn.Parameter(torch.ones(2))
    into.add_weight("model.model.w", w)
    optimizer = torch.optim.AdamW([w])
    w.sum().backward()
    optimizer.step()
    collect_optimizer(optimizer.state_dict(), into)
    found = into.finish()
    assert [(piece.name, piece.kind) for piece in found.pieces] == [
        ("model.w", "weight"),
        ("model.w", "step"),
        ("model.w", "exp_avg"),
        ("model.w", "exp_avg_sq"),
    ]
