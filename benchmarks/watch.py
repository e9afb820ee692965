"""Cost of `train.consistency_check`: the CPU time of a step that is checked, over that of one that is not."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpt import WARM, config_of
from benchmarks.timing import Loop, time_ratio
from benchmarks.worlds import read_asked, run_world, write_found
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config.sections.train import Watch
from unipar.distributed.place import Place
from unipar.errors import UniparError
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run
from unipar.training.training_run import TrainingRun
from unipar.utils.table import format_table

STRATEGIES = ("native/nothing", "native/parameters", "deepspeed/gradients", "horovod/nothing", "accelerate/nothing")
LIMIT = 1.0
"""Percent of a step's CPU time that one check in 100 steps may cost."""


def benchmark_watch() -> tuple[dict[str, Any], bool]:
    """Measure what one check costs beside the step that it looks at, for the default of one check in 100 steps."""
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    good = True
    for strategy in STRATEGIES:
        try:
            ratio = found[strategy] = run_world("benchmarks.watch:measure_check", asked=strategy)
        except UniparError as e:
            found[strategy] = {"failed": str(e)}
            rows.append((strategy, f"failed: {e}"))
            good = False
            continue
        low, middle, high = (ratio[key] - 1.0 for key in ("low", "middle", "high"))
        good = good and low <= LIMIT
        rows.append((strategy, f"{middle:.2f} [{low:.2f}..{high:.2f}]", str(ratio["rounds"])))
    print(
        format_table(
            ("char GPT, 4 samples", "cost of train.consistency_check, % of a step's CPU time", "pairs"),
            rows,
            right=(2,),
        )
    )
    print(f"one check in 100 steps; lower ends at most {LIMIT:g} %: {'met' if good else 'MISSED'}\n")
    return found, good


def measure_check(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure steps with and without a check in turn; entry function of the worker."""
    config = config_of(read_asked(run), place.size).changed({"train.consistency_check": Watch(every=1)})
    task: Task = TaskRef.of(None, config.task, {}).load()
    settled = settle(config, place.size)
    with open_run(settled, registry.find_backend(settled.strategy.backend), task, place, run) as live:
        share = next(live.batches())

        def loop_of(watched: TrainingRun, every: int) -> Loop:
            def step() -> None:
                watched.watch.every = every
                watched.step(share)
                watched.seek(watched.done - 1)

            return step

        checked, plain = loop_of(live, 1), loop_of(live, 1_000_000)
        for _ in range(WARM):
            plain()
            checked()
        write_found(run, asdict(time_ratio(checked, plain)))
