"""Bubble of a pipeline, measured on blocks that sleep, beside the formula: `python -m benchmarks.bubble [4x8 1f1b]`."""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.bubble_task import BACKWARD_SECONDS, FORWARD_SECONDS
from unipar.backend import offered_strategies as strategies
from unipar.comparison.strategy_world import StrategyWorld
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.config.sections.strategy import SCHEDULES, PipelineSchedule
from unipar.config.settled import SettledConfig
from unipar.planning.pipeline_order import bubble
from unipar.task.reference import TaskRef
from unipar.utils.table import format_table

ROOT = Path(__file__).parent.parent
SIZES = ("2x4", "2x8", "4x4", "4x12")
"""Ranks x microbatches of a step."""

BLOCKS_PER_RANK = 2
STEPS = 7


def busy_seconds(micros: int) -> float:
    """Return the time in which a rank works in a step, under every schedule."""
    return micros * BLOCKS_PER_RANK * (FORWARD_SECONDS + BACKWARD_SECONDS)


def settle_schedule(schedule: PipelineSchedule, ranks: int, micros: int) -> SettledConfig:
    """Return the config of one row."""
    word = "" if schedule == "1f1b" else f"+{schedule}"
    strategy = Strategy.parse(f"native/nothing+pipeline{ranks}{word}")
    given: dict[str, Any] = {
        "task": {"use": f"{ROOT}/benchmarks/bubble_task.py:Sleeping", "args": {"blocks": BLOCKS_PER_RANK * ranks}},
        "device": "cpu",
        "parallel": {"data": 1, "pipeline": ranks, "schedule": schedule},
        "batch": {"total": 2 * micros, "micro": 2},
        "train": {"steps": 100, "optimizer": {"lr": 1e-3}},
        "data": {"last_batch": "drop"},
    }
    config = strategies.config_in_strategy(load_given_config(given, None).config, strategy)
    return SettledConfig.of(config, strategy, ranks, "cpu")


def measure_step(schedule: PipelineSchedule, ranks: int, micros: int) -> float:
    """Return the seconds of the fastest step on its slowest rank: whatever else runs only makes steps longer."""
    settled = settle_schedule(schedule, ranks, micros)
    with tempfile.TemporaryDirectory(prefix="unipar-bubble-") as folder:
        ref = TaskRef.of(None, settled.config.task, {})
        with closing(StrategyWorld(settled, ref, Path(folder) / "run", {})) as run:
            run.start("1")
            run.train_steps(2)
            return min(run.train_steps(STEPS))


def main(words: list[str]) -> int:
    """Measure the selected sizes and schedules and print the table."""
    sizes = [word for word in words if "x" in word] or list(SIZES)
    schedules: list[PipelineSchedule] = [schedule for schedule in SCHEDULES if schedule in words] or list(SCHEDULES)
    rows: list[tuple[str, ...]] = []
    for size in sizes:
        ranks, micros = map(int, size.split("x"))
        for schedule in schedules:
            seconds = measure_step(schedule, ranks, micros)
            waits = 1 - busy_seconds(micros) / seconds
            formula = f"{'< ' if schedule == 'zerobubble' else ''}{bubble(schedule, ranks, micros):.3f}"
            rows.append((str(ranks), str(micros), schedule, f"{1000 * seconds:.0f}", f"{waits:.3f}", formula))
            print(*rows[-1], file=sys.stderr, flush=True)
    print(
        format_table(
            ("ranks", "microbatches", "schedule", "ms a step", "waits", "formula"), rows, right=(0, 1, 3, 4, 5)
        )
    )
    forward, backward = (f"{1000 * seconds:.0f} ms" for seconds in (FORWARD_SECONDS, BACKWARD_SECONDS))
    print(f"{BLOCKS_PER_RANK} blocks a rank, which sleep {forward} in forward and {backward} in backward")
    print(f"waits: share of a step in which a rank does not work; the fastest of {STEPS} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
