"""Check that all memory has a name, in each strategy: `python -m benchmarks.memory [10M fp32 2 native/nothing]`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from unipar.backend import checks
from unipar.backend import offered_strategies as strategies
from unipar.comparison.library_traffic import has_library_traffic, with_library_traffic
from unipar.comparison.strategy_world import StrategyWorld
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, UniparError, Unsupported
from unipar.memory.account import PASSES_BY_IMPORTANCE, PASSES_IN_ORDER, MemoryAccount, PhasePeak
from unipar.memory.sources.malloc_build import METER_ENVIRONMENT, build_meter, preload_environment
from unipar.results.memory_tables import format_mib, largest_account
from unipar.task.reference import TaskRef
from unipar.utils.table import format_table
from unipar.utils.text import format_duration

ROOT = Path(__file__).parent.parent
SIZES: dict[str, dict[str, int]] = {
    "10M": {"layers": 5, "width": 384, "heads": 6},
    "50M": {"layers": 7, "width": 768, "heads": 12},
}
PRECISIONS = ("fp32", "bf16-mixed", "bf16-master")
WORLDS = ("1", "2")
LARGER_WORLDS = ("4",)
"""Worlds that are measured when they are named."""

PROFILER_ARGUMENT = "profiler"
"""Argument that selects PyTorch's profiler, as on machines where the meter cannot be compiled."""

UNNAMED_SHARE_LIMIT = 0.02
"""Largest share of a peak that may have no name."""

OVERCOUNT_LIMIT = 0.001
"""Largest share by which named bytes may exceed a peak; beyond it bytes were counted twice."""


def config_of(size: str, precision: str, world: int) -> Config:
    """Return the config of one row of the table."""
    task = {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": {**SIZES[size], "context": 64}}
    settings: dict[str, Any] = {
        "task": task,
        "device": "cpu",
        "parallel": {"data": world},
        "batch": {"total": 4},
        "train": {"steps": 10, "precision": precision, "optimizer": {"lr": 3e-4}},
    }
    return load_given_config(settings, None).config


def measure_account(
    settled: SettledConfig, environment: dict[str, str], *, library_traffic: bool = False
) -> MemoryAccount:
    """Return the account of the rank that used the most memory.

    `library_traffic`: with what the strategy's library sends without torch.distributed, from a world of its own.
    """
    with tempfile.TemporaryDirectory(prefix="unipar-memory-") as folder:
        ref = TaskRef.of(None, settled.config.task, {})
        with closing(StrategyWorld(settled, ref, Path(folder) / "run", environment)) as run:
            run.start("1")
            run.train_steps(2)
            run.record_memory(sorted(PASSES_BY_IMPORTANCE, key=PASSES_IN_ORDER.index))
            accounts = run.accounts()
            if library_traffic and has_library_traffic(run):
                accounts = with_library_traffic(run, accounts, "1")
            return largest_account(accounts)


def named_bytes(phase: PhasePeak) -> int:
    """Return the bytes that have a name: with the unnamed rest they add up to the peak, alone they may exceed it."""
    return sum(size for category, size in phase.held.items() if category != "unattributed")


def result_row(name: tuple[str, ...], phases: Sequence[PhasePeak]) -> tuple[tuple[str, ...], bool]:
    """Return a row of the table, and whether all phases are within the limits."""
    peak = max(phases, key=lambda phase: phase.peak)
    worst = max(phases, key=lambda phase: abs(phase.unattributed))
    twice = any(named_bytes(phase) > (1 + OVERCOUNT_LIMIT) * phase.peak for phase in phases)
    good = not twice and worst.unattributed <= UNNAMED_SHARE_LIMIT
    shown = f"{100 * worst.unattributed:.2f} % in {worst.name}"
    return (
        *name,
        format_mib(peak.peak),
        format_mib(named_bytes(peak)),
        shown,
        "" if good else "TWICE" if twice else "MISSED",
    ), good


def select_rows(words: list[str]) -> Iterator[tuple[tuple[str, ...], SettledConfig]]:
    """Yield name and config of each row, without strategies that do not support the precision."""
    sizes = [w for w in words if w in SIZES] or list(SIZES)
    precisions = [w for w in words if w in PRECISIONS] or list(PRECISIONS)
    worlds = [w for w in words if w in (*WORLDS, *LARGER_WORLDS)] or list(WORLDS)
    wanted = [w for w in words if w not in (*SIZES, *PRECISIONS, *WORLDS, *LARGER_WORLDS, PROFILER_ARGUMENT)]
    for size, precision, world in product(sizes, precisions, worlds):
        for strategy in strategies.expand_strategy_patterns(tuple(wanted or ("*",))):
            try:
                config = strategies.config_in_strategy(config_of(size, precision, int(world)), strategy)
                checks.check_can_run(config)
            except (Unsupported, ConfigError):
                continue
            settled = SettledConfig.of(config, strategy, int(world), "cpu")
            yield (size, precision, world, str(strategy)), settled


def main(words: list[str]) -> int:
    """Measure the selected rows and print the table; return 1 where a row misses the limits."""
    rows: list[tuple[str, ...]] = []
    missed = 0
    began = time.monotonic()
    environment = dict(METER_ENVIRONMENT) if PROFILER_ARGUMENT in words else preload_environment(build_meter())
    todo = list(select_rows(words))
    for i, (name, settled) in enumerate(todo, 1):
        try:
            row, good = result_row(name, measure_account(settled, environment).phases)
        except UniparError as e:
            row, good = (*name, f"failed: {str(e).splitlines()[0]}"), False
        took = format_duration(time.monotonic() - began)
        print(f"{i} of {len(todo)}, {took}:", *filter(None, row), file=sys.stderr, flush=True)
        rows.append(row)
        missed += not good
    header = ("model", "precision", "ranks", "strategy", "peak MiB", "named MiB", "largest unnamed share", "")
    print(format_table(header, rows, right=(2, 4, 5), width=110))
    took = format_duration(time.monotonic() - began)
    good = f"{len(rows) - missed} of {len(rows)}"
    print(f"nothing counted twice, and at most {UNNAMED_SHARE_LIMIT:.0%} unnamed: {good}, in {took}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
