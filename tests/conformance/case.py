"""`Case`: a task, a config, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import unipar
from tests.conformance import tasks
from unipar.backend.cells import config_in_cell
from unipar.config import Cell, Config, Precision

TOTAL, STEPS = 16, 6
SIZES = (1, 2, 4)
"""Worlds that the suite plays."""


@dataclass(frozen=True)
class Tolerance:
    """Of the loss (absolute), the norm (relative) and parameters (absolute; None: not promised)."""

    loss: float
    norm: float
    params: float | None


CHAIN = Tolerance(2e-6, 1e-5, 2e-5)
OWN_NORMS = Tolerance(2e-6, 1e9, 2e-5)
GPT2 = Tolerance(2e-6, 1e-6, 5e-5)
"""Its larger first weights make larger roundings; greedy generation is equal all the same."""

FP32, FP64, BF16 = Tolerance(2e-6, 1e-6, 2e-5), Tolerance(1e-13, 1e-13, 1e-12), Tolerance(5e-3, 2e-2, None)


@dataclass(frozen=True)
class Case:
    name: str
    task: Callable[[], unipar.Task]
    accumulate: int = 2
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a task of several parts."""

    precision: Precision = "fp32"
    train: Mapping[str, Any] = field(default_factory=dict[str, Any])
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further sections of the config."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    micro: bool = False
    """Held against one process that works through the same microbatches, with the same random numbers."""

    sizes: tuple[int, ...] = SIZES
    tolerance: Tolerance = FP32
    machines: str = ""
    """Machine of each rank, as if there were several: `abab` are two, whose ranks come in turn."""

    hop: int | None = None
    """After this step the state moves into a new engine."""

    apart: bool = False
    """Runs in a world of its own, with its own timeout, which may die."""

    local: bool = False
    """Held against ranks that train by themselves and take their mean."""

    error: str = ""
    """The NonFinite message that every rank must raise."""

    cells: tuple[str, ...] = ("*",)
    """Where it is played, if not everywhere."""

    axes: bool = True
    """Played in cells with axes of the mesh too: not if its loss counts its own calls, as there are more of them."""

    @property
    def averaged(self) -> bool:
        return "ema" in self.train

    @property
    def several(self) -> bool:
        return self.name.startswith("several parts")

    @property
    def through(self) -> bool:
        return self.name.startswith("several parts, one loss")

    def on(self, cell: Cell) -> bool:
        """Return whether it is played in this cell."""
        return (self.axes or cell.axes.ranks == 1) and any(fnmatchcase(str(cell), pattern) for pattern in self.cells)

    def config(self, cell: Cell, size: int) -> Config:
        accumulate = 1 if self.accumulate == 1 else self.accumulate
        batch = {"total": TOTAL, "micro": TOTAL // (accumulate * size)}
        # eps: single elements whose gradient is near zero are else moved by rounding noise, a lr at a time
        optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
        train: dict[str, Any] = {"optimizer": optimizer, "clip": 0.3, "precision": self.precision} | dict(self.train)
        train.setdefault("watch", {"every": 3})
        if "epochs" not in train:
            train["steps"] = STEPS
        options = {k: dict(v) for k, v in self.options.items()}
        made: dict[str, Any] = {"device": "cpu", "batch": batch, "train": train, "log": {"every": 2}}
        made |= {"launch": {"heartbeat": 15.0, "timeout": 20.0}, "options": options} | dict(self.more)
        # 64 samples fill all batches, so that nothing is left out
        free = "ragged" in self.name or "tokens" in made["batch"] or self.task is tasks.Streamed
        if cell.axes.pieces > 1 and not free:
            made["data"] = {"ragged": "drop"} | made.get("data", {})
        made["parallel"] = {"data": size, "shard": cell.shard} | made.get("parallel", {})
        return config_in_cell(Config.model_validate(made), cell)
