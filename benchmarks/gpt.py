"""Comparison of unipar with a loop written by hand, on the character GPT of the quickstart."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.loops import CLIP, DECAY, LR, by_hand
from benchmarks.timing import Loop, count_calls, interleaved, interval, time_ratio
from benchmarks.worlds import read_asked, write_found
from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config, Strategy
from unipar.config.config_source import load_config_file
from unipar.distributed.place import Place
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
STEPS, WARM = 1_000_000, 3


def config_of(strategy: str, ranks: int) -> Config:
    """Return the quickstart's config in a strategy: four samples on each rank, no accumulation, nothing logged."""
    change: dict[str, Any] = {
        "parallel.data": ranks,
        "batch": {"micro": 4, "accumulate": 1, "total": None},
        "train": {
            "steps": STEPS,
            "clip": CLIP,
            "optimizer": {"name": "adamw", "lr": LR, "weight_decay": DECAY, "decay": "all"},
            "schedule": {"name": "constant"},
        },
        "log.every": STEPS,
    }
    return strategies.config_in_strategy(load_config_file(QUICKSTART, (), change).config, Strategy.parse(strategy))


@dataclass(frozen=True)
class LoopPair:
    """Both loops in one process, over the same batch."""

    ours: Loop
    hand: Callable[[], Loop]
    """Function that creates another loop written by hand, with a model of its own."""


@contextmanager
def open_loops(strategy: str, place: Place, run: Path) -> Generator[LoopPair]:
    """Context manager: start a run in the strategy; yields both loops."""
    config = config_of(strategy, place.size)
    task: Task = TaskRef.of(None, config.task, {}).load()
    settled = settle(config, place.size)
    with open_run(settled, registry.find_backend(settled.strategy.backend), task, place, run) as live:
        local_batch = next(live.batches())

        def ours() -> None:
            before = live.done
            live.step(local_batch)
            live.seek(before)

        def hand() -> Loop:
            torch.manual_seed(0)
            model: Any = task.model()
            return by_hand(strategy, model, task.loss, local_batch[0], config)

        live.step(local_batch)
        yield LoopPair(ours, hand)


def measure_one_process(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure CPU time and calls in one process; entry function of the worker."""
    strategy = read_asked(run)
    with open_loops(strategy, place, run) as pair:
        hand = pair.hand()
        for _ in range(WARM):
            pair.ours()
            hand()
        found = {
            "ratio": asdict(time_ratio(pair.ours, hand)),
            "calls": [count_calls(pair.ours), count_calls(hand)],
        }
    write_found(run, found)


def measure_two_ranks(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure the wall clock of two ranks under DDP, and the difference of two equal loops; entry of the workers."""
    with open_loops("native/nothing", place, run) as pair:
        loops = {"unipar": pair.ours, "hand": pair.hand(), "hand again": pair.hand()}
        for loop in loops.values():
            for _ in range(WARM):
                loop()
        dist.barrier()
        times = interleaved(loops, 24, 2, time.perf_counter)
    if place.rank == 0:
        base = times["hand"]
        found = {
            name: asdict(interval([a / b for a, b in zip(times[name], base, strict=True)]))
            for name in ("unipar", "hand again")
        }
        write_found(run, found)
