"""Runs that are killed and go on: `python -m tests.support.training_kills FOLDER STRATEGY KILLS SEED [s3]` tells how.

`unipar run --resume` trains and saves every few steps. A rank, the parent or all of them are killed by SIGKILL at a
random moment; every published checkpoint must then verify, the last one that the run log names must be there, and the
next start goes on from the newest. After the last kill a run goes on to the end: each step is in the run log once, with
the loss of a run that nobody killed, to the bit. With `s3` the checkpoints are in an object store, over HTTP.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.object_store import object_store
from tests.support.run_logs import rows_of, step_losses
from tests.support.world import PYTHONPATH_VARIABLE, ROOT, eventually, is_running
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.config import Strategy
from unipar.errors import CheckpointError
from unipar.run_folder.layout import checkpoint_folder
from unipar.utils.address import Address, Location

STRATEGIES = (
    "native/parameters",
    "native/nothing+tensor2",
    "deepspeed/gradients",
    "horovod/nothing",
    "accelerate/parameters",
)
"""One strategy of each library, and one that is split over tensor."""

VICTIMS = ("a rank", "the parent", "all")
EVERY = 4
"""Steps between checkpoints."""

START, END = 120.0, 10.0
"""Seconds within which a run must train, and within which all its processes must be gone once it is killed."""

LATEST = 1.5
"""Seconds after the first step within which a run is killed; four times as many where a save goes over HTTP."""

_SIZE = {"layers": 2, "width": 16, "heads": 2, "context": 8}


@dataclass
class Played:
    """Result of the kills of one strategy."""

    strategy: str
    kills: Counter[str] = field(default_factory=Counter[str])
    published: int = 0
    """Checkpoints that were verified after kills."""

    too_early: int = 0
    """Kills before the first checkpoint."""

    left: int = 0
    """Kills that left a save unfinished."""

    steps: int = 0
    faults: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def play(folder: Path, strategy: str, kills: int, seed: int, to: str | None = None) -> Played:
    """Kill so many runs of a strategy, one after the other, each of which goes on from the last.

    `to`: address of a folder for the checkpoints, instead of the run's own.
    """
    draw, played, began = random.Random(f"{strategy} {seed}"), Played(strategy), time.monotonic()
    folder.mkdir(parents=True)
    config = endless_config(strategy, to)
    (folder / "killed.json").write_text(json.dumps(config), "utf-8")
    run = folder / "runs" / "killed"
    for _ in range(kills):
        _kill_once(folder, run, to, draw, played)
        _check(run, to, played)
    found = find_checkpoints(checkpoint_folder(run, to))
    steps = (found[0].step if found else 0) + 3 * EVERY
    for name, resume in (("killed", "--resume"), ("whole", "--out=runs/whole")):
        (folder / f"{name}.json").write_text(
            json.dumps(config | {"train": config["train"] | {"steps": steps}}), "utf-8"
        )
        command, environment = killed_command(name, resume), run_environment()
        done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    told, whole = step_losses(run), step_losses(folder / "runs" / "whole")
    if told != whole:
        differs = next((pair for pair in zip(told, whole, strict=False) if pair[0] != pair[1]), (len(told), len(whole)))
        played.faults.append(f"its losses are not those of a run that nobody killed: {differs}")
    played.steps, played.seconds = steps, time.monotonic() - began
    return played


def endless_config(strategy: str, to: str | None = None) -> dict[str, Any]:
    """Return the config of a run on two ranks that saves every few steps and does not end by itself."""
    parsed = Strategy.parse(strategy)
    axes = {key: size for key, size in parsed.axes.sizes.items() if size > 1}
    return {
        "task": {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": _SIZE},
        "device": "cpu",
        "backend": parsed.backend,
        "parallel": {"data": 2 // parsed.axes.ranks, "shard": parsed.shard, **axes},
        "batch": {"total": 8},
        "train": {"steps": 1_000_000, "optimizer": {"name": "adamw", "lr": 1e-3}, "clip": 1.0},
        "log": {"every": 1},
        "checkpoint": {"every": EVERY, "keep": 2, "to": to},
    }


def killed_command(name: str, *flags: str) -> list[str]:
    """Return the command that runs a config of this folder."""
    return [sys.executable, "-m", "unipar", "run", f"{name}.json", *flags]


def run_environment() -> dict[str, str]:
    """Return the environment in which it runs."""
    return {**os.environ, **PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "1"}


def start_run(folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
    """Return the command that runs a config of this folder, started; said.txt has what it prints."""
    with (folder / "said.txt").open("wb") as said:
        return subprocess.Popen(
            killed_command(name, *flags), cwd=folder, env=run_environment(), stdout=said, stderr=said, process_group=0
        )


def wait_until_trained(process: subprocess.Popen[bytes], folder: Path, run: Path, before: int = 0) -> None:
    """Wait until the attempt after `before` ones has logged a step."""
    until = time.monotonic() + START
    while not has_trained(run, before):
        if process.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"{run} did not train: {(folder / 'said.txt').read_text('utf-8', errors='replace')}")
        time.sleep(0.01)


def _kill_once(folder: Path, run: Path, to: str | None, draw: random.Random, played: Played) -> None:
    """Start the run, wait until it trains, and kill somebody a moment later."""
    if run.exists() and not find_checkpoints(checkpoint_folder(run, to)):
        shutil.rmtree(run)  # it was killed before its first checkpoint
    before, flags = len(rows_of(run, "start")), ["--resume"] * run.exists()
    process = start_run(folder, "killed", *flags)
    wait_until_trained(process, folder, run, before)
    time.sleep(draw.uniform(0.0, LATEST if to is None else 4 * LATEST))
    ranks = [pid for rank in (0, 1) if (pid := pid_of_rank(run, rank)) is not None]
    victim = draw.choice(VICTIMS)
    played.kills[victim] += 1
    for pid in {"a rank": [draw.choice(ranks)], "the parent": [process.pid], "all": [process.pid, *ranks]}[victim]:
        os.kill(pid, signal.SIGKILL)
    process.wait(START)
    outlive = f"{played.strategy}: ranks outlive a kill of {victim} by {END:g} s"
    eventually(lambda: not any(map(is_running, ranks)), outlive, END)


def _check(run: Path, to: str | None, played: Played) -> None:
    """Verify every published checkpoint, and look for the last one that the run log names."""
    folder = checkpoint_folder(run, to)
    found = find_checkpoints(folder)
    for one in found:
        try:
            verify_checkpoint(one.path)
            played.published += 1
        except CheckpointError as e:
            played.faults.append(str(e))
    saved = [row["step"] for row in rows_of(run, "checkpoint")]
    if saved and (not found or found[0].step < saved[-1]):
        played.faults.append(f"the checkpoint of step {saved[-1]} was reported and is not there")
    played.too_early += not found
    played.left += len(_names_in(folder)) > len(found)


def _names_in(folder: Location) -> set[str]:
    if isinstance(folder, Address):
        return {name.partition("/")[0] for name in RemoteFolder(folder).names()}
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def pid_of_rank(run: Path, rank: int) -> int | None:
    """Return the process of a rank in the last attempt; None if it has not begun."""
    starts = rows_of(run, "start", rank=rank)
    return starts[-1]["pid"] if starts else None


def has_trained(run: Path, before: int) -> bool:
    """Return whether the attempt after `before` ones has logged a step."""
    rows = rows_of(run)
    starts = [i for i, row in enumerate(rows) if row["event"] == "start"]
    return len(starts) > before and any(row["event"] == "step" for row in rows[starts[-1] :])


def main() -> None:
    """Print the result as JSON."""
    folder, strategy, kills, seed, *more = sys.argv[1:]
    with object_store() if more == ["s3"] else nullcontext() as store:
        to = None if store is None else f"{store.address}/killed"
        print(json.dumps(vars(play(Path(folder), strategy, int(kills), int(seed), to))))


if __name__ == "__main__":
    main()
