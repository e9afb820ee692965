"""Inside a world of one machine: strategies train as if its ranks were on several, and count what a step sends."""

from __future__ import annotations

import json
import socket
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.conformance import tasks
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config, Strategy
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.distributed.world_machines import WorldMachines
from unipar.errors import UniparError
from unipar.launcher.processes.group import WorkerGroup
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter, Traffic
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.tracking.writer import TrackerWriter
from unipar.training.setup import build_run

STEPS, COUNTED = 6, 5


@dataclass(frozen=True)
class Placed:
    """A strategy whose ranks are on these machines: `abab` are four ranks on two machines, in turn."""

    strategy: str
    machines: str
    parallel: dict[str, Any] = field(default_factory=dict[str, Any])
    train: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def config(self) -> Config:
        optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
        train = {"steps": STEPS, "optimizer": optimizer, "clip": 0.3} | self.train
        axes = Strategy.parse(self.strategy).axes
        data = len(self.machines) // axes.ranks
        parallel = {"data": data, **axes.sizes, **self.parallel, "shard": Strategy.parse(self.strategy).shard}
        made: dict[str, Any] = {
            "device": "cpu",
            "batch": {"total": 16, "micro": 2},
            "train": train,
            "log": {"every": STEPS},
        }
        made |= {"parallel": parallel, "launch": {"heartbeat": 15.0, "timeout": 20.0}}
        return strategies.config_in_strategy(Config.model_validate(made), Strategy.parse(self.strategy))


def train_placed(jobs: Sequence[Placed], run: Path) -> list[list[dict[str, Any]]]:
    """Return what each rank says of each job: losses, bytes by axis and collective, and bytes between machines."""
    run.mkdir()
    (run / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]), "utf-8")
    size, entry = len(jobs[0].machines), f"{__name__}:run"
    with WorkerGroup(run, size, entry, environment=PYTHONPATH_VARIABLE, heartbeat=100.0) as workers:
        workers.wait()
    return [[torch.load(run / f"{i}-{rank}.pt", weights_only=True) for rank in range(size)] for i in range(len(jobs))]


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Train the jobs of RUN/jobs.json, one after another."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    jobs = [Placed(**told) for told in json.loads((folder / "jobs.json").read_text("utf-8"))]
    world = registry.find_backend("native").join(jobs[0].config, place)
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for number, job in enumerate(jobs):
        world.machines = WorldMachines.of_ranks(job.machines, job.machines, [""] * place.size)
        try:
            said = _train(job, world, folder, heartbeat)
        except UniparError as e:
            said = {"error": type(e).__name__, "message": str(e)}
        torch.save(said, folder / f"{number}-{place.rank}.pt")
        world.barrier()
    world.close()


def _train(job: Placed, world: World, folder: Path, heartbeat: HeartbeatWriter) -> dict[str, Any]:
    settled = settle(job.config, world.size)
    backend = registry.find_backend(settled.strategy.backend)
    traffic: Traffic = Counter()
    with RunLog(run_log_path(folder, world.rank)) as run_log:
        trackers = TrackerWriter((), folder, world.rank)
        made = build_run(
            settled, backend, tasks.Grouped(), world, run_log=run_log, heartbeat=heartbeat, trackers=trackers
        )
        counter = CollectiveCounter(traffic, world.mesh, world.machines)

        def count(done: int) -> None:
            if done == COUNTED - 1:
                counter.__enter__()
            elif done == COUNTED:
                counter.__exit__(None, None, None)

        made.at_boundary(count)
        made.record(made.steps)
        made.task.train(made)
        made.finish()
        losses = made.recorded_steps()["loss"]
        pieces = [[p.name, list(p.where), list(p.shape)] for p in made.pieces() if p.kind == "weight"]
        for part in made.parts.values():
            part.engine.close()
    run_log_path(folder, world.rank).unlink()
    return {"loss": losses, "sent": dict(traffic), "across": counter.across, "pieces": pieces}
