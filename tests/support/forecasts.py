"""Forecasts as `compare` leaves them in compare.json, made up: peaks of the right size, nothing was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unipar.backend import Category
from unipar.results.forecast.records import NOT_PLANNED

LESS = 0.99
"""Part of each measured category that is predicted."""


def example_forecast(
    strategies: Mapping[str, tuple[str, Mapping[Category, int]]], sent: Mapping[str, Mapping[str, int]], **changed: Any
) -> dict[str, Any]:
    """The forecast of these strategies by phase and measured bytes: a little less of each category; one is refused.

    What is split shrinks with the number of ranks, down to half; the batch of 8 samples can be divided up to 8.
    """
    planned = [_strategy(name, phase, held, sent[name]) for name, (phase, held) in strategies.items()]
    refused = {"strategy": "accelerate/nothing", "refusal": "model.offload: cpu is not planned yet"}
    return {
        "device": "cpu",
        "ranks": 2,
        "samples": 8,
        "share": 4,
        "memory": 160 * 2**20,
        "memory_from": "batch.memory",
        "headroom": 0.05,
        "strategies": [*planned, refused],
        "notes": ["activations do not grow evenly with the microbatch: other sizes are estimates"],
        "seconds": 1.5,
        **changed,
    }


def _strategy(name: str, phase: str, measured: Mapping[Category, int], sent: Mapping[str, int]) -> dict[str, Any]:
    held = {c: round(size * LESS) for c, size in measured.items() if c not in (*NOT_PLANNED, "unattributed")}
    peak = sum(held.values())
    ranks = [1] if name == "single" else [2**i for i in range(11)]
    split = 0.0 if name.endswith("/nothing") or name == "single" else 1.0
    worlds = [{"ranks": n, "peak": round(peak * (1 + split * (1 / n - 0.5) / 1.5)), **_batch(n)} for n in ranks]
    lacks = max(worlds[0 if name == "single" else 1]["peak"] - 152 * 2**20, 0)
    return {
        "strategy": name,
        "phases": [{"name": phase, "peak": peak, "held": held}],
        "sent": {"data": dict(sent)} if sent else {},
        "worlds": worlds,
        "ways": [f"needs {lacks} bytes more, whatever the micro", "native/parameters fits"] if lacks else [],
    }


def _batch(ranks: int) -> dict[str, Any]:
    samples = 8 if ranks <= 8 else 4 * ranks
    return {"samples": samples, "micro": 4 if ranks > 8 else 8 // ranks, "phase": "update"}
