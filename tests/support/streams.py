"""Streams for tests: one that is read as it is, one that says its parts, one that splits itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from typing_extensions import override

import unipar
from unipar.backend import registry
from unipar.config import Config
from unipar.data.dataset import training_data_source
from unipar.data.stream_loader import StreamLoader
from unipar.distributed.place import Place
from unipar.errors import UniparError


class Numbers(IterableDataset[Tensor]):
    """0 to `count`; it would split itself among workers, if it saw any."""

    def __init__(self, count: int = 10, first: int = 0, step: int = 1) -> None:
        self.range = range(first, count, step)

    @override
    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        seen = self.range if info is None else self.range[info.id :: info.num_workers]
        for number in seen:
            yield torch.tensor(float(number))


class Counted(Numbers):
    def __len__(self) -> int:
        return len(self.range)


class Sharded(Counted):
    def shard(self, index: int, count: int) -> Counted:
        return Counted(self.range.stop, index, count)


class Noisy(Numbers):
    """In an order of its own each epoch, with noise in every sample."""

    @override
    def __iter__(self) -> Iterator[Tensor]:
        for i in torch.randperm(len(self.range)).tolist():
            yield torch.tensor(float(self.range[i])) + torch.rand(())


class Split(IterableDataset[Tensor]):
    """Splits itself by rank and worker, as scripts for one library do."""

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        self.count, self.rank, self.ranks = count, rank, ranks

    @override
    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = range(self.rank * workers + worker, self.count, self.ranks * workers)
        return (torch.tensor(float(n)) for n in mine)


class Streamed(unipar.Task):
    """A line through numbers that come as a stream, and are evaluated from one too."""

    def __init__(self, count: int = 22, kind: str = "Noisy") -> None:
        self.count, self.kind = count, kind

    @override
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    @override
    def data(self) -> Any:
        if self.kind == "Split":
            ranks = torch.distributed.get_world_size()
            return Split(self.count, torch.distributed.get_rank(), ranks)
        return {"Noisy": Noisy, "Counted": Counted, "Sharded": Sharded}[self.kind](self.count)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[:, None] / 10
        return (model(x) - 3 * x).square().mean()

    @override
    def validation(self) -> Any:
        return Numbers(13)


STREAM_CASES = {
    "shards": ("Sharded", {"stream": "shards"}),
    "shards, workers": ("Sharded", {"stream": "shards", "workers": 2}),
    "shards, dropped": ("Sharded", {"stream": "shards", "last_batch": "drop"}),
    "shards, refused": ("Sharded", {"stream": "shards", "last_batch": "error"}),
    "shards that lose some": ("Losing", {"stream": "shards"}),
    "own": ("Split", {"stream": "own"}),
    "own, workers": ("Split", {"stream": "own", "workers": 2}),
    "one that splits itself, unsaid": ("Split", {}),
    "another length on one rank": ("Shorter", {}),
    "whole": ("Noisy", {"workers": 1}),
}
"""What the ranks of `play` read, and how they are told to."""


class Losing(Counted):
    def shard(self, index: int, count: int) -> Counted:
        return Counted(self.range.stop - 1, index, count)


def _read(kind: str, keys: dict[str, Any], world: Any) -> dict[str, Any]:
    made = {
        "Split": Split(11, world.rank, world.size), "Shorter": Numbers(11 - 4 * world.rank),
        "Sharded": Sharded(11), "Losing": Losing(11), "Noisy": Noisy(11),
    }  # fmt: skip
    config = Config.model_validate({"batch": {"total": 4}, "train": {"steps": 1}, "data": keys})
    sizes = config.batch.settle(world.size)
    try:
        stream = StreamLoader(training_data_source(made[kind], None, default_collate, config, sizes), sizes, world, 0)
        seen: list[Any] = []
        for step in islice(stream.batches(0), 9):
            weight = sum(plan.weight for _, plan in step)
            counted = [x for batch, plan in step if plan.weight for x in batch.tolist()]
            seen.append((stream.place(len(seen) + 1)[0], counted, weight))
    except UniparError as e:
        return {"error": str(e)}
    return {"seen": seen, "later": [step[0][0].tolist() for step in islice(stream.batches(5), 4)]}


def play(place: Place, folder: Path, control: socket.socket | None) -> None:
    """An entry: reads streams in a world, one after another, and writes down which samples came."""
    torch.set_num_threads(1)
    config = Config.model_validate({"batch": {"total": 4}, "train": {"steps": 1}, "device": "cpu"})
    world = registry.find_backend("native").join(config, place)
    told = {name: _read(kind, keys, world) for name, (kind, keys) in STREAM_CASES.items()}
    (folder / f"read-{place.rank}.json").write_text(json.dumps(told), "utf-8")
    world.barrier()
    world.close()
