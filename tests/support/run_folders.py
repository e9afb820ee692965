"""Run folders written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVENTS: list[dict[str, Any]] = [
    {
        "event": "start",
        "time": 100.0,
        "rank": 0,
        "size": 2,
        "strategy": "native/nothing",
        "pid": 7,
        "parameters": 8_926_848,
    },
    {"event": "step", "time": 101.0, "step": 1, "loss": 4.5, "norm": 2.0, "lr": 1e-3, "samples": 8, "seconds": 0.5},
    {"event": "log", "time": 101.5, "step": 1, "tokens": 512},
    {"event": "step", "time": 103.0, "step": 10, "loss": 3.25, "norm": None, "lr": 1e-3, "samples": 80, "seconds": 0.2},
    {"event": "eval", "time": 104.0, "step": 10, "loss": 3.5, "accuracy": 0.25},
    {"event": "end", "time": 106.0, "steps": 12, "peak_rss": 3 * 2**20},
]

TRACE: dict[str, Any] = {
    "event": "trace",
    "time": 105.0,
    "step": 4,
    "first": 3,
    "file": "trace/rank-0.json.gz",
    "seconds": 0.3,
    "before": 0.25,
    "counted_on": "CPU",
    "entries": [
        {"name": "aten::mm", "calls": 1200, "seconds": 0.3},
        {"name": "a graph with a long name " * 3, "calls": 2, "seconds": 0.1},
    ],
}
"""Event of a run that was traced in its steps 3 and 4."""

EXPERTS: dict[str, Any] = {
    "a": {"tokens": [6, 2, 0, 0], "fullest": 3.0, "entropy": 0.406, "unused": 2, "rank": 2.0, "microbatch": 2.25},
    "b": {"tokens": [2, 2, 2, 2], "fullest": 1.0, "entropy": 1.0, "unused": 0, "rank": 1.0, "microbatch": 1.5},
}
"""Tokens of two layers of experts, as the event of a step has them."""


def wrote(run: Path, rank: int, events: list[dict[str, Any]]) -> None:
    (run / f"rank-{rank}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")


MACHINE = {"system": "Linux", "cpu": "A Processor", "cores": 2, "memory": 24 * 2**30}


def plain(run: Path, *, loss: float = 3.25, **launched: Any) -> Path:
    """A run as it lies in its folder."""
    run.mkdir(exist_ok=True)
    last = {**EVENTS[3], "loss": loss}
    wrote(run, 0, [*EVENTS[:3], last, *EVENTS[4:]])
    wrote(run, 1, [EVENTS[0], {"event": "end", "time": 106.0, "steps": 12, "peak_rss": 5 * 2**20}])
    config = {"task": {"use": "/x/task.py:Sums"}, "batch": {"total": 8}, "train": {"steps": 12, "seed": int(loss)}}
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    told = {"task": {}, "versions": {"python": "3.11.7", "torch": "2.13.0"}, "machine": MACHINE} | launched
    (run / "launch.json").write_text(json.dumps(told), encoding="utf-8")
    return run
