"""Seconds until training begins: from a command to its second step, and until a comparison is ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.timing import interval
from unipar.backend import registry
from unipar.comparison.request import CompareRequest
from unipar.comparison.strategy_world import TURNS_MODULE, StrategyWorld
from unipar.comparison.training_rounds import rotate_order
from unipar.config.settled import SettledConfig
from unipar.launcher.processes.starters import SharedForkServer
from unipar.launcher.strategy_selection import select_strategies
from unipar.utils.table import format_table

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "benchmarks" / "start_scripts"
COMMANDS: Mapping[str, Sequence[str]] = {
    "torchrun, by hand": ("torchrun", "--standalone", "--nproc-per-node", "2", "by_hand.py"),
    "python train.py": (sys.executable, "train.py"),
    "unipar run train.yaml": (sys.executable, "-m", "unipar", "run", "train.yaml", "--overwrite"),
}
RUN_ROUNDS, RUN_GOAL = 12, 0.75
"""Rounds of the commands, and the largest share of torchrun's time that unipar's may take."""

STRATEGY_ROUNDS, STRATEGY_GOAL = 3, 1 / 3
"""Rounds of a comparison's start, and the largest share of the time of separate processes that forks may take."""


def benchmark_second_step() -> tuple[dict[str, Any], bool]:
    """Measure the seconds from a command to the end of its second step: two ranks, DDP, a small model."""
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="unipar-bench-") as scratch:
        folder = Path(shutil.copytree(SCRIPTS, Path(scratch) / "scripts"))
        for i in range(RUN_ROUNDS):
            for name in rotate_order(list(COMMANDS), i):
                took[name].append(_seconds_to_second_step(COMMANDS[name], folder))
    by_hand, *ours = COMMANDS
    rows = [(by_hand, f"{interval(took[by_hand]).middle:.1f}", "")]
    found: dict[str, Any] = {"seconds": took}
    for name in ours:
        ratio = interval([mine / theirs for mine, theirs in zip(took[name], took[by_hand], strict=True)])
        found[name] = asdict(ratio)
        shown = f"{ratio.middle:.2f} [{ratio.low:.2f}..{ratio.high:.2f}]"
        rows.append((name, f"{interval(took[name]).middle:.1f}", shown))
    print(format_table(("command to second step, two ranks", "s", "/ torchrun"), rows, right=(1, 2)))
    good = all(found[name]["middle"] <= RUN_GOAL for name in ours)
    print(f"{RUN_ROUNDS} rounds; at most {RUN_GOAL} of torchrun: {'met' if good else 'MISSED'}\n")
    return found, good


def _seconds_to_second_step(command: Sequence[str], folder: Path) -> float:
    noted = folder / "time"
    noted.unlink(missing_ok=True)
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]))
    own = {"TIME_FILE": str(noted), "OMP_NUM_THREADS": "1", "PATH": scripts, "PYTHONPATH": python_path}
    began = time.monotonic()
    subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=True, capture_output=True)
    return float(noted.read_text("ascii")) - began


def benchmark_ten_starts() -> tuple[dict[str, Any], bool]:
    """Measure the seconds until the quickstart's comparison has all strategies ready: new interpreters, and forks."""
    asked = CompareRequest.of(str(ROOT / "configs" / "quickstart.yaml"), None, None, "a benchmark starts strategies")
    settled = asked.prepared.settled(2)
    chosen = select_strategies(settled, settled.config.compare.strategies)
    strategies = [at for row, at in chosen.values() if at is not None and row.outcome == "waits"]
    took: dict[bool, list[float]] = {False: [], True: []}
    for i in range(STRATEGY_ROUNDS):
        for forks in rotate_order([False, True], i):
            took[forks].append(_seconds_until_ready(asked, strategies, forks=forks))
    ratio = interval([mine / theirs for mine, theirs in zip(took[True], took[False], strict=True)])
    rows = [
        (name, *(f"{seconds:.1f}" for seconds in took[forks]))
        for name, forks in (("new interpreters", False), ("forks, and their server", True))
    ]
    header = (f"start of {len(strategies)} strategies", *(f"s, round {i + 1}" for i in range(STRATEGY_ROUNDS)))
    print(format_table(header, rows, right=range(1, STRATEGY_ROUNDS + 1)))
    good = len(strategies) == 10 and ratio.middle <= STRATEGY_GOAL
    spread = f"{ratio.middle:.2f} [{ratio.low:.2f}..{ratio.high:.2f}]"
    print(f"forks / new interpreters: {spread}, at most {STRATEGY_GOAL:.2f}: {'met' if good else 'MISSED'}\n")
    return {"seconds": {"separate": took[False], "forks": took[True]}, "ratio": asdict(ratio)}, good


def _seconds_until_ready(asked: CompareRequest, strategies: Sequence[SettledConfig], *, forks: bool) -> float:
    with tempfile.TemporaryDirectory(prefix="unipar-bench-") as scratch, ExitStack() as stack:
        server = stack.enter_context(SharedForkServer([TURNS_MODULE], asked.meter_environment, use=forks))
        began = time.monotonic()
        server.start(
            list({at.strategy.backend: registry.find_backend(at.strategy.backend) for at in strategies}.values())
        )
        for at in strategies:
            world = StrategyWorld(at, asked.ref, Path(scratch) / at.strategy.slug, asked.meter_environment, server)
            stack.callback(world.close)
            world.start("1")
        return time.monotonic() - began
