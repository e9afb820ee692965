"""Whether every byte has a name, in every cell: `python -m benchmarks.memory [10M fp32 2 native/nothing]`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from unipar.backend import cells, checks
from unipar.comparison.cell_world import Contestant
from unipar.config import Config
from unipar.config.settled import SettledConfig
from unipar.config.source import given
from unipar.errors import UniparError, Unsupported
from unipar.memory.account import ORDER, PASSES, Phase
from unipar.memory.sources.malloc_build import SETTLED, built, preloading
from unipar.results.memory_tables import fullest, mib
from unipar.task.reference import TaskRef
from unipar.utils.table import table
from unipar.utils.text import format_duration

ROOT = Path(__file__).parent.parent
SIZES: dict[str, dict[str, int]] = {
    "10M": {"layers": 5, "width": 384, "heads": 6},
    "50M": {"layers": 7, "width": 768, "heads": 12},
}
PRECISIONS = ("fp32", "bf16-mixed", "bf16-master")
WORLDS = ("1", "2")
PROFILER = "profiler"
"""The word for what is done where no meter can be compiled."""

LIMIT = 0.02
"""The share of a peak that may have no name."""

OVER = 0.001
"""The share by which what is named may exceed a peak: more was counted twice."""


def config_of(size: str, precision: str, world: int) -> Config:
    task = {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": {**SIZES[size], "context": 64}}
    told: dict[str, Any] = {
        "task": task,
        "device": "cpu",
        "parallel": {"data": world},
        "batch": {"total": 4},
        "train": {"steps": 10, "precision": precision, "optimizer": {"lr": 3e-4}},
    }
    return given(told, None).config


def measured(settled: SettledConfig, environment: dict[str, str]) -> list[Phase]:
    """The fullest rank's phases."""
    with tempfile.TemporaryDirectory(prefix="unipar-memory-") as folder:
        ref = TaskRef.of(None, settled.config.task, {})
        with closing(Contestant(settled, ref, Path(folder) / "run", environment)) as run:
            run.start("1")
            run.go(2)
            run.watch(sorted(PASSES, key=ORDER.index))
            return list(fullest(run.accounts()).phases)


def named(phase: Phase) -> int:
    """All that has a name. With what has none it adds up to the peak by arithmetic; alone it may be too much."""
    return sum(size for category, size in phase.held.items() if category != "unattributed")


def row(name: tuple[str, ...], phases: list[Phase]) -> tuple[tuple[str, ...], bool]:
    """A line of the table, and whether it is as promised: in every phase."""
    peak = max(phases, key=lambda phase: phase.peak)
    worst = max(phases, key=lambda phase: abs(phase.unattributed))
    twice = any(named(phase) > (1 + OVER) * phase.peak for phase in phases)
    good = not twice and worst.unattributed <= LIMIT
    shown = f"{100 * worst.unattributed:.2f} % in {worst.name}"
    return (*name, mib(peak.peak), mib(named(peak)), shown, "" if good else "TWICE" if twice else "MISSED"), good


def asked(words: list[str]) -> Iterator[tuple[tuple[str, ...], SettledConfig]]:
    """Each row's name, and what runs in it; cells that say no to a precision have none."""
    sizes = [w for w in words if w in SIZES] or list(SIZES)
    precisions = [w for w in words if w in PRECISIONS] or list(PRECISIONS)
    worlds = [w for w in words if w in WORLDS] or list(WORLDS)
    wanted = [w for w in words if w not in (*SIZES, *PRECISIONS, *WORLDS, PROFILER)]
    for size, precision, world in product(sizes, precisions, worlds):
        for cell in cells.expand(tuple(wanted or ("*",))):
            try:
                config = cells.at(config_of(size, precision, int(world)), cell)
                checks.check(config)
            except Unsupported:
                continue
            settled = SettledConfig.of(config, cell, int(world), "cpu")
            yield (size, precision, world, str(cell)), settled


def main(words: list[str]) -> int:
    rows: list[tuple[str, ...]] = []
    missed = 0
    began = time.monotonic()
    environment = dict(SETTLED) if PROFILER in words else preloading(built())
    todo = list(asked(words))
    for i, (name, settled) in enumerate(todo, 1):
        try:
            made, good = row(name, measured(settled, environment))
        except UniparError as e:
            made, good = (*name, f"failed: {str(e).splitlines()[0]}"), False
        took = format_duration(time.monotonic() - began)
        print(f"{i} of {len(todo)}, {took}:", *filter(None, made), file=sys.stderr, flush=True)
        rows.append(made)
        missed += not good
    header = ("model", "precision", "ranks", "cell", "peak MiB", "named MiB", "most without a name", "")
    print(table(header, rows, right=(2, 4, 5), width=110))
    took = format_duration(time.monotonic() - began)
    good = f"{len(rows) - missed} of {len(rows)}"
    print(f"no more is named than there was, and at most {LIMIT:.0%} has no name: {good}, in {took}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
