"""Horovod's own optimizer and library on one rank without others, beside what is planned for any number of ranks."""

from __future__ import annotations

import json
import os
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support import library_shapes
from unipar.backend import Micro, Part, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.distributed.place import Place
from unipar.model.parameter_groups import OptimizerFactory, parameter_groups

MICRO = 2


def config_of(seed: int, ranks: int, microbatches: int, options: dict[str, Any]) -> Config:
    """Return the config of a model drawn from a seed."""
    given: dict[str, Any] = {
        "task": {"use": f"{library_shapes.__file__}:LibraryShapes", "args": {"seed": seed}},
        "device": "cpu",
        "parallel": {"data": ranks},
        "batch": {"total": ranks * MICRO * microbatches, "micro": MICRO},
        "train": {"steps": 3},
        "options": {"horovod": options},
    }
    return strategies.config_in_strategy(load_given_config(given).config, Strategy.parse("horovod/nothing"))


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Write the bytes that each case of cases.json sends into compared.json, and those planned by number of ranks."""
    warnings.filterwarnings("ignore")
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    cases = json.loads((folder / "cases.json").read_text("utf-8"))
    compared = [[_planned(*case), _sent(place, *case)] for case in cases]
    (folder / "compared.json").write_text(json.dumps(compared), "utf-8")


def _planned(seed: int, microbatches: int, options: dict[str, Any]) -> dict[str, dict[str, int]]:
    from unipar.training.fake_run.trace_task import trace_task

    traced = trace_task(config_of(seed, 1, 1, options), MICRO)
    timeline, found = replace(traced.timeline, microbatches=microbatches), dict[str, dict[str, int]]()
    for ranks in (2, 3, 8, 64, 1000):
        config = config_of(seed, ranks, microbatches, options)
        sent = registry.find_backend("horovod").predict(config, timeline, ranks, device="cpu").sent
        found[str(ranks)] = {volume.collective: volume.size for volume in sent}
    return found


def _sent(place: Place, seed: int, microbatches: int, options: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of a step by collective, from Horovod's timeline."""
    config, task = config_of(seed, 1, microbatches, options), library_shapes.LibraryShapes(seed)
    backend = registry.find_backend("horovod")
    world = backend.join(config, place)
    model = task.model()
    groups = parameter_groups(model, config, task_groups=None, own_optimizer=False)
    factory = OptimizerFactory(groups, config, world.device, own=None)
    with mock.patch("horovod.torch.optimizer.size", return_value=2):  # on one rank it would hand on no gradients
        engine = backend.build(Part("model", model, factory, ()), config, world)
    micros = [Micro(tuple(t[:MICRO] for t in task.data().tensors), 1.0)] * microbatches

    def loss(model: Any, batch: Any, number: int) -> torch.Tensor:
        return task.loss(model, batch)

    engine.step(loss, micros, 1.0, lambda phase: None)
    with backend.sends(world) as sent:
        engine.step(loss, micros, 1.0, lambda phase: None)
    world.close()
    return dict(sent)
