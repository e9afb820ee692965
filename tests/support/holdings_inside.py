"""Inside a world: what each strategy's engine holds at the marks of its fourth step, in bytes by category."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.backend import Engine, Holding, Micro, Part, checks, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.memory.account import CATEGORIES
from unipar.model.blocks import find_blocks
from unipar.model.create import create_parts
from unipar.model.parameter_groups import OptimizerFactory, parameter_groups
from unipar.training.setup import EngineFactory
from unipar.verification.worker import replay

V, D, WIDE, STEPS = 512, 256, 1024, 4
REPLAY = "a replay of two"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, WIDE, bias=False)
        self.down = nn.Linear(WIDE, D, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Million(nn.Module):
    """1,179,904 trained parameters in six tensors, one of them tied; 65,536 frozen ones; a buffer, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.gain = nn.Parameter(torch.ones(D))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(D, D, bias=False).requires_grad_(False)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.zeros(D))
        self.plain = [torch.zeros(64)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * self.gain + self.get_buffer("shift")
        for block in self.blocks:
            h = block(h)
        return self.head(self.frozen(h))


class Task(unipar.Task):
    @override
    def model(self) -> nn.Module:
        return Million()

    @override
    def data(self) -> Any:
        return TensorDataset(torch.arange(16).view(2, 8))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())


def config_of(strategy: str, precision: str, size: int) -> Config:
    parsed = Strategy.parse("single" if strategy == REPLAY else strategy)
    made: dict[str, Any] = {"device": "cpu", "batch": {"total": 2 * size, "micro": 2}, "log": {"every": 2}}
    made["parallel"] = {"data": size, "shard": parsed.shard}
    made["train"] = {"steps": STEPS, "precision": precision, "optimizer": {"name": "adamw", "lr": 1e-3}}
    return strategies.config_in_strategy(Config.model_validate(made), parsed)


def engine_of(config: Config, world: World, build: EngineFactory) -> Engine:
    task = Task()
    (name, module), *_ = create_parts(task.model, config, world).items()
    groups = parameter_groups(module, config, task.groups(module), own_optimizer=False)
    optimizer = OptimizerFactory(groups, config, world.device, own=None)
    part = Part(name, module, optimizer, find_blocks(module, config, task.blocks(module)))
    return build(part, config, world)


def bytes_by_category(holdings: Iterable[Holding]) -> dict[str, int]:
    """Bytes by category; a storage counts once, for the first of its categories."""
    found: dict[int, tuple[int, int]] = {}
    for held in holdings:
        storage, place = held.tensor.untyped_storage(), CATEGORIES.index(held.category)
        if held.tensor.device.type != "meta" and storage.nbytes():
            known = found.get(storage.data_ptr(), (place, 0))
            found[storage.data_ptr()] = min(known[0], place), storage.nbytes()
    return {name: n for i, name in enumerate(CATEGORIES) if (n := sum(b for p, b in found.values() if p == i))}


def train_and_record(config: Config, world: World, build: EngineFactory, micros: int, *, ask: bool) -> dict[str, Any]:
    """The losses, and of the last step what is held at each mark; asked at all marks of all steps, or never."""
    engine, task = engine_of(config, world, build), Task()
    batch = torch.arange(16).view(2, 8) + world.rank
    seen: dict[str, dict[str, int]] = {}

    def mark(phase: str) -> None:
        if ask:
            seen[phase] = bytes_by_category(engine.holdings())

    def loss(model: Any, batch: Any, number: int) -> Any:
        return task.loss(model, batch)

    losses: list[float] = []
    for _ in range(STEPS):
        micro = Micro(batch, 1 / world.size / micros)
        losses.append(float(engine.step(loss, [micro] * micros, 1.0, mark).loss))
        mark("rest")
    listed = [[(h.category, h.name) for h in engine.holdings()] for _ in range(2)]
    engine.close()
    return {"losses": losses, "seen": seen, "listed": listed[0], "steady": listed[0] == listed[1]}


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Plays the rows of RUN/rows.json in one world, which the first row's backend joins."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = json.loads((folder / "rows.json").read_text("utf-8"))
    first = config_of(rows[0][0], rows[0][1], place.size)
    world = registry.find_backend(first.backend).join(first, place)
    results: list[dict[str, Any]] = []
    for strategy, precision, micros in rows:
        config = config_of(strategy, precision, place.size)
        build = (
            replay.replay_builder(2, "shares", per_microbatch=False)
            if strategy == REPLAY
            else checks.check_can_run(config).build
        )
        result = train_and_record(config, world, build, micros, ask=True)
        results.append(result | {"unasked": train_and_record(config, world, build, micros, ask=False)["losses"]})
    (folder / f"{place.rank}.json").write_text(json.dumps(results), "utf-8")
    world.barrier()
    world.close()
