"""Seconds from a killed rank to the next step, in the same world and in a smaller one: python -m benchmarks.restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.utils.table import format_table

WORLDS = ((2, 2), (2, 1), (4, 4), (4, 2))
"""Ranks before and after."""

STRATEGIES = ("native/nothing", "native/parameters", "deepspeed/parameters")
ROUNDS = 3
STEPS, KILLED_AFTER = 8, 5
WIDTH, LAYERS = 512, 8
"""Sizes of the model: 2 million parameters, so that the time is that of a start and not of a load."""


class Killed(unipar.Task):
    """A model whose last rank kills itself after some steps, once; rank 0 writes down when each step has ended."""

    def __init__(self, notes: str) -> None:
        self.notes = Path(notes)

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    @override
    def data(self) -> Any:
        return TensorDataset(torch.ones(256, WIDTH))

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    @override
    def train(self, run: Any) -> None:
        killed = self.notes / "killed"
        for local_batch in run.batches():
            run.step(local_batch)
            if run.rank == 0:
                with (self.notes / "steps").open("a", encoding="utf-8") as file:
                    file.write(json.dumps([os.getpid(), run.done, time.time()]) + "\n")
            if run.rank == run.size - 1 and run.done == KILLED_AFTER and not killed.exists():
                killed.write_text(f"{time.time()}", encoding="utf-8")
                os.kill(os.getpid(), signal.SIGKILL)


def measure_restart(strategy: str, before: int, after: int, folder: Path) -> tuple[float, int]:
    """Return the seconds from the kill to the end of the next step, and the number of that step.

    In the same world unipar starts the ranks again (`launch.restarts`). In a smaller one the command ends with an
    error, and the next one continues with fewer ranks, as a loop in a shell does.
    """
    backend, _, shard = strategy.partition("/")
    config = {
        "task": {"use": f"{Path(__file__).resolve()}:Killed", "args": {"notes": str(folder)}},
        "backend": backend,
        "device": "cpu",
        "parallel": {"data": before, "shard": shard},
        "batch": {"total": 8},
        "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-4}},
        "checkpoint": {"every": 1},
        "launch": {"restarts": int(before == after)},
        "out": str(folder / "run"),
    }
    file = folder / "restart.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    code = _unipar("run", str(file))
    if before != after:
        assert code != 0, "the rank was not killed"
        code = _unipar("run", str(file), "--resume", "--set", f"parallel.data={after}")
    assert code == 0, f"{strategy} on {after} ranks: exit code {code}; its folder: {folder}"
    rows: list[tuple[int, int, float]] = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    _, step, ended = next(row for row in rows if row[0] != rows[0][0])
    return ended - float((folder / "killed").read_text()), step


def _unipar(*arguments: str) -> int:
    command = [sys.executable, "-m", "unipar", *arguments]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def _rows(strategies: Sequence[str], rounds: int) -> Iterator[list[str]]:
    for strategy in strategies:
        for before, after in WORLDS:
            seconds: list[float] = []
            for _ in range(rounds):
                folder = Path(tempfile.mkdtemp(prefix="unipar-restart-"))
                seconds.append(measure_restart(strategy, before, after, folder)[0])
                shutil.rmtree(folder)
            spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
            yield [strategy, str(before), str(after), f"{statistics.median(seconds):.1f} s", spread]


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    header = ["strategy", "ranks", "ranks after", "kill to next step", f"of {rounds}"]
    print(format_table(header, list(_rows(STRATEGIES, rounds)), right=(1, 2, 3), width=100))


if __name__ == "__main__":
    main()
