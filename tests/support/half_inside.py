"""Inside a world: fp16 in one strategy after another, on the CPU, where `check` would refuse it; one step overflows."""

from __future__ import annotations

import json
import socket
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tests.conformance import tasks
from unipar.backend import checks, registry
from unipar.backend import offered_strategies as strategies
from unipar.backend.checks import settle
from unipar.config import Config, Strategy
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.tracking.writer import TrackerWriter
from unipar.training.setup import build_run

BAD = 3
"""The step whose gradient on the last rank is infinite: its first microbatch there has one that no scale saves."""

ENTRY = "tests.support.half_inside:run"


@dataclass(frozen=True)
class Row:
    strategy: str
    train: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def config(self, ranks: int) -> Config:
        optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
        train = {"steps": 6, "optimizer": optimizer, "clip": 0.3, "precision": "fp16", "schedule": {"warmup": 5}}
        made: dict[str, Any] = {"device": "cpu", "batch": {"total": 16, "micro": 4}, "train": train | self.train}
        made |= {"parallel": {"data": ranks}, "log": {"every": 1}, "options": self.options}
        made |= {"launch": {"heartbeat": 15.0, "timeout": 20.0}}
        return strategies.config_in_strategy(Config.model_validate(made), Strategy.parse(self.strategy))


class Overflowing(tasks.Grouped):
    def __init__(self, world: World, micros: int) -> None:
        super().__init__()
        self.bad = micros * (BAD - 1) if world.rank == world.size - 1 else -1
        self.calls = -1

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        self.calls += 1
        loss = super().loss(model, batch)
        return loss + (loss - loss.detach()) * 1e36 if self.calls == self.bad else loss


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Plays the rows of RUN/rows.json in one world."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    checks._refuse_on_cpu = lambda config: iter(())  # pyright: ignore[reportPrivateUsage]
    rows = [Row(**row) for row in json.loads((folder / "rows.json").read_text("utf-8"))]
    first = rows[0].config(place.size)
    world = checks.check_can_run(first).join(first, place)
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for i, row in enumerate(rows):
        torch.save(_train_row(row.config(place.size), world, folder, heartbeat), folder / f"{i}-{place.rank}.pt")
        world.barrier()
    world.close()


def _train_row(config: Config, world: World, folder: Path, heartbeat: HeartbeatWriter) -> dict[str, Any]:
    settled = settle(config, world.size)
    task = Overflowing(world, settled.sizes.accumulate)
    trackers = TrackerWriter((), folder, world.rank)
    with RunLog(run_log_path(folder, world.rank)) as run_log:
        backend = registry.find_backend(settled.strategy.backend)
        made = build_run(settled, backend, task, world, run_log=run_log, heartbeat=heartbeat, trackers=trackers)
        made.record(made.steps)
        engine: Any = made.engine
        scales: list[float] = []
        states = [_state(engine)]
        for share in made.batches():
            made.step(share)
            scales.append(float(engine.scaler.scale))
            states.append(_state(engine))
        made.finish()
        kept = made.recorded_steps()
        engine.close()
    rows = list(RunLog.read(run_log_path(folder, world.rank)))
    run_log_path(folder, world.rank).unlink()
    return {
        "loss": kept["loss"],
        "norm": kept["norm"],
        "scales": scales,
        "moved": [any(not torch.equal(now[k], was[k]) for k in now) for was, now in pairwise(states)],
        "skipped": [row["step"] for row in rows if row["event"] == "skipped"],
        "rates": [row["lr"] for row in rows if row["event"] == "step"],
    }


def _state(engine: Any) -> dict[Any, Tensor]:
    """This rank's part; the optimizer's state comes with its first step."""
    return {(p.name, p.kind, p.where): p.tensor.detach().clone() for p in engine.pieces() if p.kind == "weight"}
