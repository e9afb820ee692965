"""Inside a world: tasks of `hand_loops`, one after another, each with a new engine; results go to the run folder."""

from __future__ import annotations

import json
import socket
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.hand_loops import HAND_LOOPS, MICRO, STEPS, TOTAL
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.tracking.writer import TrackerWriter
from unipar.training.setup import build_run


def config_of(name: str, backend: str, shard: str, ranks: int) -> Config:
    """Return the config with which unipar trains the task of this name."""
    made: dict[str, Any] = {
        "backend": backend,
        "device": "cpu",
        "parallel": {"data": ranks, "shard": shard},
        "data": {"shuffle": False},
        "batch": {"total": TOTAL, "micro": MICRO},
        "train": {"steps": STEPS, **HAND_LOOPS[name].train},
        "log": {"every": 1},
    }
    return Config.model_validate(made)


def logged_steps(folder: Path) -> list[dict[str, Any]]:
    """Return what the run in this folder has logged of its steps."""
    return [row for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == "step"]


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Train each task named in RUN/tasks.json in a folder of its own, by the backend named there."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    asked = json.loads((folder / "tasks.json").read_text("utf-8"))
    backend = registry.find_backend(asked["backend"])
    world = None
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for name in asked["tasks"]:
        config = config_of(name, asked["backend"], asked["shard"], place.size)
        world = world or registry.find_backend(config.backend).join(config, place)
        task = HAND_LOOPS[name].make_task(Path(asked["pretrained"]))
        own = folder / name
        own.mkdir(exist_ok=True)
        with RunLog(run_log_path(own, place.rank)) as run_log:
            trackers = TrackerWriter((), own, place.rank)
            live = build_run(
                settle(config, place.size),
                backend,
                task,
                world,
                run_log=run_log,
                heartbeat=heartbeat,
                trackers=trackers,
            )
            live.train()
            live.finish()
            for part in live.parts.values():
                part.engine.close()
        world.barrier()
    assert world is not None
    world.close()
