"""Cost of unipar, in a step and at the start: `python -m benchmarks.overhead`, or some parts: `... tiny run`."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_use import benchmark_checkpoint_blocks, benchmark_checkpoint_load, benchmark_resume
from benchmarks.checkpoint_write import benchmark_checkpoint_write
from benchmarks.mesh_time import benchmark_mesh
from benchmarks.peers import benchmark_peers
from benchmarks.start import benchmark_second_step, benchmark_ten_starts
from benchmarks.timing import interval
from benchmarks.watch import benchmark_watch
from benchmarks.worlds import run_world
from unipar.backend.installed import machine_summary
from unipar.comparison.training_rounds import rotate_order
from unipar.errors import UniparError
from unipar.launcher.processes.group import WorkerGroup
from unipar.memory.sources.malloc_build import METER_ENVIRONMENT, build_meter, preload_environment
from unipar.utils.table import format_table

STRATEGIES = (
    "native/nothing",
    "native/optimizer",
    "native/gradients",
    "native/parameters",
    "deepspeed/nothing",
    "deepspeed/optimizer",
    "deepspeed/gradients",
    "deepspeed/parameters",
    "horovod/nothing",
    "accelerate/nothing",
    "accelerate/gradients",
    "accelerate/parameters",
    "accelerate/optimizer+zero",
    "accelerate/gradients+zero",
    "accelerate/parameters+zero",
)
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
GOALS = {"unipar": 0.0, "unipar + its data": 0.25}
"""Largest time of a step beyond a loop written by hand, as a share of that of Fabric's step."""

ROUNDS, STEPS = 60, 2
"""Rounds in which the processes take turns, and steps in each turn."""

LIMIT, HALF = 1.01, 0.02
"""Limit for the lower end of a ratio's interval, and the half-width of the interval that is aimed at."""


def benchmark_tiny() -> tuple[dict[str, Any], bool]:
    """Measure microseconds per step beyond a loop written by hand, on a model that takes almost no time."""
    found = run_world("benchmarks.tiny:measure")
    rows: list[tuple[str, ...]] = []
    over: dict[str, float] = {}
    for name, told in found.items():
        base = found["hand + DataLoader" if "data" in name.lower() else "hand"]["seconds"]
        gap = interval([(mine - hand) * 1e6 for mine, hand in zip(told["seconds"], base, strict=True)])
        over[name] = gap.middle
        took = statistics.median(told["seconds"]) * 1e6
        shown = "" if base is told["seconds"] else f"{gap.middle:+.0f} [{gap.low:+.0f}..{gap.high:+.0f}]"
        rows.append((name, f"{took:.0f}", shown, f"{told['calls']:.0f}"))
    print(
        format_table(
            ("one process, tiny MLP", "us a step", "over the hand loop", "calls a step"), rows, right=(1, 2, 3)
        )
    )
    good = True
    for name, share in GOALS.items():
        takes = over[name] / over["fabric"]
        good = good and takes <= share
        met = "met" if takes <= share else "MISSED"
        print(f"{name}: {over[name]:+.0f} us a step, {takes:.2f} of Fabric's; goal {share}: {met}")
    print()
    return {"loops": found, "over": over}, good


def benchmark_gpt() -> tuple[dict[str, Any], bool]:
    """Measure the ratio of CPU time to a loop written by hand for the same library, in one process."""
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    good = True
    for strategy in STRATEGIES:
        try:
            told = found[strategy] = run_world("benchmarks.gpt:measure_one_process", asked=strategy)
        except UniparError as e:
            found[strategy] = {"failed": str(e)}
            rows.append((strategy, f"failed: {e}"))
            good = False
            continue
        r = told["ratio"]
        wide = "" if (r["high"] - r["low"]) / 2 <= HALF else " (wide)"
        good = good and r["low"] <= LIMIT
        shown = f"{r['middle']:.3f} [{r['low']:.3f}..{r['high']:.3f}]{wide}"
        rows.append((strategy, shown, str(r["rounds"]), *(f"{n:.0f}" for n in told["calls"])))
    header = ("one process, char GPT", "CPU time / hand loop", "pairs", "calls", "by hand")
    print(format_table(header, rows, right=(2, 3, 4)))
    print(f"lower ends at most {LIMIT}: {'met' if good else 'MISSED'}")
    if any("wide" in row[1] for row in rows):
        print(f"(wide): time ran out before the interval's half-width was {HALF}; other programs use this machine")
    print()
    return found, good


def benchmark_ranks() -> tuple[dict[str, Any], bool]:
    """Measure the wall clock of two ranks under DDP, and of the same loop a second time."""
    found = run_world("benchmarks.gpt:measure_two_ranks", size=2)
    rows = [
        (name, f"{r['middle']:.3f} [{r['low']:.3f}..{r['high']:.3f}]", str(r["rounds"])) for name, r in found.items()
    ]
    print(format_table(("two ranks, DDP, char GPT", "wall clock / hand loop", "rounds"), rows, right=(2,)))
    print("hand again is the same loop a second time: differences inside its interval are noise\n")
    return found, True


def benchmark_meter_off() -> tuple[dict[str, Any], bool]:
    """Measure the ratio of CPU time to a process without the meter, after the recording has ended."""
    arms = {
        "without": {},
        "without, again": {},
        "its settings alone": METER_ENVIRONMENT,
        "preloaded, counting over": preload_environment(build_meter()),
    }
    with ExitStack() as stack:
        groups: list[WorkerGroup] = []
        for more in arms.values():
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unipar-bench-")))
            variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
            groups.append(
                stack.enter_context(
                    WorkerGroup(run, 1, "benchmarks.off:time_steps_in_turns", environment=variables, control=True)
                )
            )
            groups[-1].receive_from_all()

        def turn(group: WorkerGroup) -> float:
            group.send_to_all(str(STEPS).encode())
            return float(group.receive_from_all()[0])

        took: list[list[float]] = [[] for _ in groups]
        for i in range(ROUNDS):
            for at in rotate_order(range(len(groups)), i):
                took[at].append(turn(groups[at]))
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    for name, times in list(zip(arms, took, strict=True))[1:]:
        r = interval([mine / bare for mine, bare in zip(times, took[0], strict=True)])
        found[name] = asdict(r)
        rows.append((name, f"{r.middle:.3f} [{r.low:.3f}..{r.high:.3f}]", str(r.rounds)))
    print(format_table(("memory, char GPT", "CPU time / without", "rounds"), rows, right=(2,)))
    good = found["preloaded, counting over"]["low"] <= LIMIT
    print("without, again is a second process of that kind: differences inside its interval are noise")
    print(f"lower end at most {LIMIT}: {'met' if good else 'MISSED'}\n")
    return found, good


def main(parts: list[str]) -> int:
    """Run the named parts, or all, and write results.json; return 1 where a goal is missed."""
    known = {
        "tiny": benchmark_tiny,
        "gpt": benchmark_gpt,
        "ranks": benchmark_ranks,
        "off": benchmark_meter_off,
        "run": benchmark_second_step,
        "strategies": benchmark_ten_starts,
        "watch": benchmark_watch,
        "peers": benchmark_peers,
        "mesh": benchmark_mesh,
        "checkpoint": benchmark_checkpoint_write,
        "save": benchmark_checkpoint_blocks,
        "load": benchmark_checkpoint_load,
        "resume": benchmark_resume,
    }
    wrong = [name for name in parts if name not in known]
    if wrong:
        print(f"no part {wrong[0]!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"machine": machine_summary()}
    good = True
    for name in parts or known:
        results[name], met = known[name]()
        good = good and met
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
