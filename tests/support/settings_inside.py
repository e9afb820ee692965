"""Inside a world of two: a backend's options, one after another, each with a new engine."""

from __future__ import annotations

import gc
import json
import socket
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.conformance import tasks
from tests.conformance.cases import Case
from tests.conformance.inside import run_case_or_error
from unipar.backend import registry
from unipar.config import Config, Strategy
from unipar.distributed.place import Place
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path


class InSets(tasks.Grouped):
    """A loss that asks its own half of four ranks something, through a process set of Horovod's."""

    @override
    def loss(self, model: Any, batch: tasks.Batch) -> Tensor:
        hvd: Any = import_module("horovod.torch")
        if not hvd.is_initialized():  # the one process that the others are held against
            return super().loss(model, batch)
        rank = hvd.rank()
        mine = [rank // 2 * 2, rank // 2 * 2 + 1]
        known = hvd.mpi_ops._basics
        half = hvd.ProcessSet(mine)
        half.process_set_id = next(i for i, ranks in known._get_process_set_ids_and_ranks().items() if ranks == mine)
        said = hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum, name=f"half-{mine[0]}", process_set=half)
        assert said.item() == sum(mine)
        return super().loss(model, batch)


@contextmanager
def record_whole_elements() -> Generator[list[int]]:
    """Elements of parameters that were in memory on this rank, whenever a tensor came in while ZeRO-3 was made."""
    engine: Any = import_module("unipar_deepspeed.engine")
    broadcast, seen = engine.broadcast_tensor, list[int]()
    older = _parameters()
    known = {id(p) for p in older}

    def counted(*args: Any) -> Tensor:
        seen.append(sum(p.numel() for p in _parameters() if id(p) not in known and p.device.type != "meta"))
        return broadcast(*args)

    engine.broadcast_tensor = counted
    try:
        yield seen
    finally:
        engine.broadcast_tensor = broadcast


def _parameters() -> list[nn.Parameter]:
    return [p for p in gc.get_objects() if type(p) is nn.Parameter]


TASKS = {"grouped": tasks.Grouped, "in sets": InSets}


def case_of(row: dict[str, object]) -> Case:
    """A model with two groups, two microbatches; `row` says what is special."""
    given = {key: value for key, value in row.items() if key not in ("strategy", "name", "task")}
    return Case(str(row["name"]), TASKS[str(row.get("task", "grouped"))], **given)  # pyright: ignore[reportArgumentType]


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Plays the rows of RUN/rows.json in one world, which the first row's backend joins."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = json.loads((folder / "rows.json").read_text("utf-8"))
    first: Config = case_of(rows[0]).config(Strategy.parse(rows[0]["strategy"]), place.size)
    world = registry.find_backend(first.backend).join(first, place)
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for i, row in enumerate(rows):
        case, strategy = case_of(row), Strategy.parse(row["strategy"])
        with record_whole_elements() as most:
            result = run_case_or_error(case, strategy, world, folder, heartbeat)
        torch.save(result | {"most": most}, folder / f"{i}-{place.rank}.pt")
        world.barrier()
    world.close()
