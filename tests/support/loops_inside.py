"""Inside a world of one: unipar's loop and the one that the benchmark holds against it, on a small model."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpt import config_of
from benchmarks.loops import by_hand
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.distributed.place import Place
from unipar.engines.fsdp2_sharded import fsdp_groups
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """For each strategy both loops' losses, and what the one by hand trains."""
    said: dict[str, Any] = {}
    for strategy in (folder / "strategies").read_text("utf-8").split():
        config = config_of(strategy, place.size)
        assert config.task is not None
        small = config.task.model_copy(update={"args": {"layers": 2, "width": 16, "heads": 2, "context": 16}})
        config = config.model_copy(update={"task": small})
        task: Task = TaskRef.of(None, config.task, {}).load()
        theirs: list[float] = []
        models: list[nn.Module] = []

        def loss(model: nn.Module, batch: Any, task: Task = task, to: Any = (theirs, models)) -> Tensor:
            found = task.loss(model, batch)
            to[0].append(found.item())
            to[1].append(model)
            return found

        own = folder / strategy.replace("/", "-")
        own.mkdir()
        settled = settle(config, place.size)
        with open_run(settled, registry.find_backend(settled.strategy.backend), task, place, own) as live:
            local_batch = next(live.batches())
            torch.manual_seed(0)
            fresh: Any = task.model()
            hand = by_hand(strategy, fresh, loss, local_batch[0], config)
            for _ in range(4):
                hand()
            ours: list[float] = []
            for _ in range(4):
                before = live.done
                found: Any = live.step(local_batch).loss
                ours.append(float(found))
                live.seek(before)
            wrapped = vars(live.engine).get("wrapped") or vars(live.engine)["engine"]
            said[strategy] = {"losses": [ours, theirs], "models": [kind(wrapped), kind(models[-1])]}
    (folder / "said.json").write_text(json.dumps(said), encoding="utf-8")


def kind(model: Any) -> str:
    """What wraps it, and how it splits."""
    if isinstance(model, FSDPModule):
        modules: list[Any] = [m for m in cast("nn.Module", model).modules() if isinstance(m, FSDPModule)]
        groups = [group for module in modules for group in fsdp_groups(module._get_fsdp_state())]
        return f"FSDP2, {len(groups)} groups, {sum(group._reshard_after_forward for group in groups)} resharded"
    stage = f" {model.zero_optimization_stage()}" if hasattr(model, "zero_optimization_stage") else ""
    return type(model).__name__ + stage
