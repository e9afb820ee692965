"""Cost of checkpoints in a run: blocks of steps with a save beside them, loading on two ranks, a start that goes on."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import interleaved, interval
from benchmarks.worlds import run_world, write_found
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.comparison.training_rounds import rotate_order
from unipar.config import Config
from unipar.config.sections.checkpoint import Checkpoint
from unipar.distributed.place import Place
from unipar.errors import UniparError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.resuming import choose_checkpoint, restore_run
from unipar.training.saves import RunCheckpoints
from unipar.training.setup import open_run
from unipar.utils.table import format_table

ROOT = Path(__file__).parent.parent
ROUNDS, BLOCK = 15, 20
"""Rounds of each part, and steps of a block."""

LONGER, SLOWER = 1.05, 1.0
"""Largest share that a block with a save may take of one without, and a load of torch.load's."""

SIZES = {"block": {"layers": 8, "width": 320}, "load": {"layers": 6, "width": 768}}
"""Models: 10 million parameters, whose state has 118 MB, and 42 million, 510 MB."""


def config_of(size: str, shard: str, ranks: int) -> Config:
    """Return the config of a model that trains for ever, four samples a step on each rank."""
    args = {**SIZES[size], "heads": 8, "context": 64}
    return Config.model_validate(
        {
            "task": {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": args},
            "device": "cpu",
            "parallel": {"data": ranks, "shard": shard},
            "batch": {"total": 4 * ranks},
            "train": {"steps": 10**6, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "log": {"every": 10**6},
        }
    )


def measure_blocks(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure blocks of steps with one asynchronous save and without, in turns; entry function of the worker."""
    config = config_of("block", "nothing", 1)
    task: Task = TaskRef.of(None, config.task, {}).load()
    settled = settle(config, 1)
    with open_run(settled, registry.find_backend(settled.strategy.backend), task, place, run) as live:
        saves = RunCheckpoints(Checkpoint(keep=1), live, run, {})
        local_batch = next(live.batches())

        def block(first: Callable[[], None]) -> float:
            began = time.perf_counter()
            first()
            for _ in range(BLOCK):
                live.step(local_batch)
            took = time.perf_counter() - began
            saves.at_boundary(0)  # raises what made a save fail
            return took

        arms: dict[str, Callable[[], None]] = {
            "without a save": lambda: None,
            "without, again": lambda: None,
            "one save beside it": lambda: saves.save(live.done),
        }
        block(arms["one save beside it"])
        took: dict[str, list[float]] = {name: [] for name in arms}
        for i in range(ROUNDS):
            for name in rotate_order(list(arms), i):
                took[name].append(block(arms[name]))
                saves.at_end(0)  # a save that outlasts its block is not in the next one
    told = [row for row in RunLog.read(run_log_path(run, 0)) if row["event"] == "checkpoint"][1:]
    found = {
        "seconds": took,
        "bytes": told[-1]["bytes"],
        "waited": [row["waited"] for row in told],
        "saved": [row["seconds"] for row in told],
    }
    write_found(run, found)


def measure_loads(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure how two ranks verify and load a checkpoint, and how they call torch.load; entry of the workers."""
    config = config_of("load", "parameters", 2)
    task: Task = TaskRef.of(None, config.task, {}).load()
    settled = settle(config, 2)
    with open_run(settled, registry.find_backend(settled.strategy.backend), task, place, run) as live:
        live.step(next(live.batches()))
        saves = RunCheckpoints(Checkpoint.model_validate({"async": False}), live, run, {})
        saves.save(1)
        path, file = saves.folder / "step-00000001", run / "state.pt"
        tensors = inspect_checkpoint(path).manifest.tensors
        if place.rank == 0:
            torch.save({key: torch.zeros(t.shape) for key, t in tensors.items()}, file)
        dist.barrier()

        def unipar() -> None:
            chosen = choose_checkpoint(str(path), path.parent, live.world, live.config, ())
            assert chosen is not None
            restore_run(live, chosen)
            dist.barrier()

        def torch_load() -> None:
            torch.load(file, weights_only=True)
            dist.barrier()

        loops = {"torch.load on each rank": torch_load, "verified and loaded": unipar}
        interleaved(loops, 1, 1, time.perf_counter)
        took = interleaved(loops, ROUNDS, 1, time.perf_counter, _give_back_memory)
        again = interleaved(loops, ROUNDS, 1, time.perf_counter, dist.barrier)
    if place.rank == 0:
        found = {"seconds": took, "again": again, "bytes": sum(4 * t.numel for t in tensors.values())}
        write_found(run, found)


def _give_back_memory() -> None:
    """Give free memory back to the system, so that a load gets new pages: it happens once, when a process starts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()


def _ratio_rows(seconds: Mapping[str, list[float]]) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    """Return a table's rows, each arm beside the first, and the intervals of their ratios.

    Where the first is there "again", what is not itself such an arm is held against the mean of both.
    """
    first = next(iter(seconds.values()))
    twice = [took for name, took in seconds.items() if took is first or name.endswith("again")]
    both = [sum(pair) / len(pair) for pair in zip(*twice, strict=True)]
    rows: list[tuple[str, ...]] = []
    found: dict[str, Any] = {}
    for name, took in seconds.items():
        base = first if any(took is one for one in twice) else both
        ratio = interval([mine / theirs for mine, theirs in zip(took, base, strict=True)])
        found[name] = asdict(ratio)
        shown = "" if took is first else f"{ratio.middle:.3f} [{ratio.low:.3f}..{ratio.high:.3f}]"
        rows.append((name, f"{interval(took).middle:.2f}", shown))
    return rows, found


def benchmark_checkpoint_blocks() -> tuple[dict[str, Any], bool]:
    """Measure how much longer a block of 20 steps takes while a checkpoint is saved beside it."""
    told = run_world("benchmarks.checkpoint_use:measure_blocks")
    rows, found = _ratio_rows(told["seconds"])
    print(format_table((f"{BLOCK} steps, one process", "s", "/ without"), rows, right=(1, 2)))
    waited, saved = (interval(told[key]).middle for key in ("waited", "saved"))
    good = found["one save beside it"]["middle"] <= LONGER
    print(
        f"{ROUNDS} rounds; {told['bytes'] / 1e6:.0f} MB a save, training waited {waited:.2f} s for the copy, published "
        f"after {saved:.2f} s; at most {LONGER}: {'met' if good else 'MISSED'}\n"
    )
    return {"ratio": found, **told}, good


def benchmark_checkpoint_load() -> tuple[dict[str, Any], bool]:
    """Measure a load on two ranks, hashes of all files included, beside torch.load of the same tensors in one file."""
    told = run_world("benchmarks.checkpoint_use:measure_loads", 2)
    rows, found = _ratio_rows(told["seconds"])
    again = _ratio_rows(told["again"])[1]
    good = found["verified and loaded"]["middle"] <= SLOWER
    print(format_table((f"{told['bytes'] / 1e6:.0f} MB, two ranks", "s", "/ torch.load"), rows, right=(1, 2)))
    used = "{middle:.3f} [{low:.3f}..{high:.3f}]".format(**again["verified and loaded"])
    print(
        f"{ROUNDS} rounds into new memory, as at a start; at most {SLOWER}: {'met' if good else 'MISSED'}\n"
        f"into memory that the process has used before: {used} of torch.load\n"
    )
    return {"ratio": found, "ratio_again": again, **told}, good


def benchmark_resume() -> tuple[dict[str, Any], bool]:
    """Measure the seconds from a command to its first step: of a new run, and of one that goes on."""
    told: dict[str, list[float]] = {"a new run": [], "--from a checkpoint": []}
    with tempfile.TemporaryDirectory(prefix="unipar-bench-") as scratch:
        folder = Path(scratch)
        config = config_of("block", "nothing", 2).changed({"train.steps": 1, "log.every": 1})
        short = config.model_dump(mode="json", exclude_unset=True)
        (folder / "run.json").write_text(json.dumps({**short, "checkpoint": {"keep": 1}}), "utf-8")
        _seconds_to_first_step(folder, "saved", ())
        checkpoint = folder / "saved" / "checkpoints" / "step-00000001"
        (folder / "run.json").write_text(json.dumps({**short, "train": {**short["train"], "steps": 2}}), "utf-8")
        ways = {"a new run": (), "--from a checkpoint": ("--from", str(checkpoint))}
        for i in range(ROUNDS):
            for name in rotate_order(list(ways), i):
                told[name].append(_seconds_to_first_step(folder, "again", ways[name]))
                shutil.rmtree(folder / "again")
    rows, found = _ratio_rows(told)
    print(format_table(("command to first step, two ranks", "s", "/ new"), rows, right=(1, 2)))
    print(f"{ROUNDS} rounds; the state has 118 MB\n")
    return {"ratio": found, "seconds": told}, True


def _seconds_to_first_step(folder: Path, out: str, flags: tuple[str, ...]) -> float:
    command = [sys.executable, "-m", "unipar", "run", "run.json", "--out", out, *flags]
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UniparError(done.stderr)
    steps = [row["time"] for row in RunLog.read(run_log_path(folder / out, 0)) if row["event"] == "step"]
    return steps[0] - began
