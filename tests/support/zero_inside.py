"""Inside a world of three: an optimizer of two parameters, whose states are split."""

from __future__ import annotations

import json
import socket
import warnings
from pathlib import Path

import torch
from torch import nn

from unipar.backend import registry
from unipar.config import Config
from unipar.distributed.place import Place


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Writes down what this rank keeps, and what the model is after a step at twice the rate."""
    warnings.filterwarnings("ignore")
    batch = {"total": place.size, "micro": 1}
    made = {"device": "cpu", "parallel": {"data": place.size}, "batch": batch, "train": {"steps": 1}}
    world = registry.find_backend("native").join(Config.model_validate(made), place)
    from unipar_native.zero_optimizer import split_optimizer

    model = nn.Linear(2, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0).grad = torch.ones_like(p)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr_decay": 0.25}]
    whole = torch.optim.Adagrad(groups, lr=0.1)  # its states are there before the first step
    split = split_optimizer(whole)
    for group in split.param_groups:
        group["lr"] *= 2
    split.step()
    said = {
        "stepped by": type(split.optim).__name__,
        "groups": [[[names[id(p)] for p in g["params"]], g["lr"], g["lr_decay"]] for g in whole.param_groups],
        "states": [names[id(p)] for p in whole.state],
        "weight": model.weight.flatten().tolist(),
        "bias": model.bias.tolist(),
    }
    (folder / f"said-{place.rank}.json").write_text(json.dumps(said), encoding="utf-8")
    world.close()
