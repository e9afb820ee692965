"""Inside a world of two: training with faults planted after its fourth step, for `train.consistency_check`."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer
from typing_extensions import override

import unipar
from tests.conformance import tasks
from tests.conformance.cases import Case
from tests.conformance.inside import run_case_or_error
from unipar.backend import registry
from unipar.config import Strategy
from unipar.distributed.place import Place
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path
from unipar.training.training_run import TrainingRun

AFTER = 4
"""Steps after which the fault is there; `train.consistency_check` looks at steps 2, 3, 6."""

Fault = Callable[[TrainingRun, Optimizer], Any]


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def change_on_one_rank(run: TrainingRun, _: Optimizer) -> None:
    if run.rank == 1:
        next(iter(run.engine.held_weights())).tensor.data.mul_(1.001)


def scale_gradients(_: TrainingRun, optimizer: Optimizer) -> None:
    def scale(*_: Any) -> None:
        for p in _tensors(optimizer):
            if p.grad is not None:
                p.grad *= 8.0

    optimizer.register_step_pre_hook(scale)


def double_rate(_: TrainingRun, optimizer: Optimizer) -> None:
    def double(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 2.0

    optimizer.register_step_pre_hook(double)


def undo_update(_: TrainingRun, optimizer: Optimizer) -> None:
    kept: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        kept.extend(p.detach().clone() for p in _tensors(optimizer))

    optimizer.register_step_pre_hook(keep)

    @torch.no_grad()
    def undo(*_: Any) -> None:
        for p in _tensors(optimizer):
            p.copy_(kept.pop(0))

    optimizer.register_step_post_hook(undo)


def leave_out_update(run: TrainingRun, _: Optimizer) -> None:
    engine = cast("Any", run.engine)
    engine.update = engine.optimizer.zero_grad


def round_states(_: TrainingRun, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def forget_parameter(_: TrainingRun, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop(0)


def read_same_samples(run: TrainingRun, _: Optimizer) -> None:
    cast("Any", run.loader).rank = 0


FAULTS: Mapping[str, Fault] = {
    "none": lambda run, optimizer: None,
    "weights": change_on_one_rank,
    "norm": scale_gradients,
    "rate": double_rate,
    "update": undo_update,
    "no update": leave_out_update,
    "dtype": round_states,
    "parameter": forget_parameter,
    "samples": read_same_samples,
}


class Watched(tasks.Plain):
    """A task whose loop plants a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = FAULTS[fault]

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
            if run.done == AFTER:
                made = cast("TrainingRun", run)
                self._fault(made, cast("Any", made.engine).base)


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Plays the faults of RUN/faults.json in the strategies that are named there."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[tuple[str, str]] = json.loads((folder / "faults.json").read_text("utf-8"))
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    world, told = None, list[str]()
    for name, fault in rows:
        strategy = Strategy.parse(name)
        sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "fused": False, "foreach": False}
        case = Case(
            fault, lambda fault=fault: Watched(fault), train={"optimizer": sgd, "consistency_check": {"every": 3}}
        )
        if world is None:
            world = registry.find_backend(strategy.backend).join(case.config(strategy, place.size), place)
        told.append(run_case_or_error(case, strategy, world, folder, heartbeat).get("message", ""))
        world.barrier()
    assert world is not None
    (folder / f"told-{place.rank}.json").write_text(json.dumps(told), "utf-8")
    world.close()
