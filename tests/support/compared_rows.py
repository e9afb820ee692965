"""Rows of comparisons made by hand."""

from __future__ import annotations

from typing import Any

from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult
from unipar.results.same_training import TrainingMarks


def ran(strategy: str, losses: list[float], ms: float = 10.0) -> StrategyResult:
    seconds = [[ms / 1e3, ms / 1e3], [ms / 1e3, 2 * ms / 1e3]]
    return StrategyResult(
        strategy=strategy, outcome="ran", losses=losses, seconds=seconds, peak_rss=[500 * 2**20, 600 * 2**20]
    )


def compared(*rows: StrategyResult, **changed: Any) -> Comparison:
    told: dict[str, Any] = {"name": "x", "out": "o", "precision": "fp32", "samples": 8, "ranks": 2, "warmup": 2}
    return Comparison(rows=list(rows), **(told | changed))


ONE = ran("single", [4.0, 3.5, 3.0], 20.0)


SAME = ran("native/nothing", [4.0, 3.5, 3.0])


FAR = ran("deepspeed/gradients", [4.0, 3.5, 3.1])


def marks(**changed: Any) -> TrainingMarks:
    told: dict[str, Any] = {
        "values": {"a": "01", "b": "02", "c": "03"},
        "kept": ("float32",),
        "computed": ("float32",),
        "batches": (("x", "y"),),
        "samples": ((8, "0a"), (8, "0b")),
        "total": 8,
        "precision": "fp32",
    }
    return TrainingMarks(**told | changed)
