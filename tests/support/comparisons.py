"""Comparisons as `compare` leaves them in a folder, made up: figures of the right size, nothing was run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.forecasts import example_forecast
from unipar.backend import Category
from unipar.config import Strategy
from unipar.memory.account import MemoryAccount, NamedBlock, PhaseName, PhasePeak, ResidentMemory
from unipar.memory.sources.profiler import ProfilerSource
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData

PARAMETER_COUNT = 8_926_848
"""Parameters; memory is told in bytes for each."""

SHARDS = ("nothing", "optimizer", "gradients", "parameters")
BytesPerParameter = dict[Category, float]

MEMORY_BY_STRATEGY: dict[str, tuple[PhaseName, BytesPerParameter]] = {
    "single": ("update", {"parameters": 4, "gradients": 4, "optimizer": 8, "temporaries": 0.571, "runtime": 0.282}),
    "native/nothing": (
        "update",
        {
            "parameters": 4,
            "gradients": 4,
            "optimizer": 8,
            "communication": 4,
            "temporaries": 0.571,
            "runtime": 0.288,
        },
    ),
    "native/parameters": (
        "backward",
        {
            "parameters": 2.578,
            "gradients": 0.214,
            "optimizer": 4,
            "communication": 1.283,
            "activations": 1.995,
            "temporaries": 0.734,
            "runtime": 0.313,
            "unattributed": 0.28,
        },
    ),
    "deepspeed/gradients": (
        "update",
        {"parameters": 4, "masters": 2, "optimizer": 4, "temporaries": 6, "library": 0.1, "runtime": 0.806},
    ),
    "deepspeed/gradients+library": (
        "backward",
        {"parameters": 4, "masters": 2, "optimizer": 4, "communication": 71.92, "runtime": 0.803},
    ),
    "horovod/nothing": (
        "update",
        {
            "parameters": 4,
            "gradients": 4,
            "optimizer": 8,
            "communication": 4.554,
            "temporaries": 0.571,
            "runtime": 0.283,
        },
    ),
}
MILLISECONDS = {
    "single": 631,
    "native/nothing": 526,
    "native/parameters": 826,
    "deepspeed/gradients": 681,
    "deepspeed/gradients+library": 785,
    "horovod/nothing": 536,
}
FRACTION: dict[PhaseName, float] = {"built": 0.6, "forward": 0.8, "backward": 0.93, "update": 0.9, "steady": 0.75}


def account(strategy: str, rank: int, scale: float = 1.0, method: str = ProfilerSource.method) -> MemoryAccount:
    """The second rank holds a little less."""
    at, held = MEMORY_BY_STRATEGY[strategy]
    share = scale * PARAMETER_COUNT * (1 - 0.02 * rank)
    sizes: dict[Category, int] = {category: round(b * share) for category, b in held.items()}
    peak = sum(sizes.values())
    phases: list[PhasePeak] = []
    for name, part in FRACTION.items():
        full: dict[Category, int] = sizes if name == at else {c: round(b * part) for c, b in sizes.items()}
        largest = (NamedBlock(category="parameters", name="wte.weight", size=1_000_001),) if name == at else ()
        phases.append(PhasePeak(name=name, peak=sum(full.values()), held=full, largest=largest))
    by: dict[PhaseName, int] = {phase.name: phase.peak for phase in phases}
    rest = by["steady"]
    curve = [(i / 400, round(_curve_bytes(i / 400, rest, by))) for i in range(401)]
    return MemoryAccount(
        rank=rank,
        method=method,
        device="cpu",
        base=2_000_000,
        phases=tuple(phases),
        peaks=(peak, peak - 1000, peak),
        curve=tuple(curve),
        marks=((0.0, "forward"), (0.36, "backward"), (0.82, "update")),
        resident=ResidentMemory(base=320 * 2**20, peak=320 * 2**20 + round(peak * 1.07), own=rest),
        sent=sent_by_collective(strategy),
        sent_along={"data": sent_by_collective(strategy)} if sent_by_collective(strategy) else {},
        sent_by="" if strategy == "single" else "records of a profiler",
        saved=(round(2 * PARAMETER_COUNT), round(1.9 * PARAMETER_COUNT)),
        notes=("a note of the one who measured",) if strategy == "native/parameters" else (),
    )


def sent_by_collective(strategy: str) -> dict[str, int]:
    """Bytes of a step by collective."""
    if strategy == "single":
        return {}
    return {"all_reduce": 4 * PARAMETER_COUNT} if "nothing" in strategy else {"reduce_scatter": 2 * PARAMETER_COUNT}


def _curve_bytes(at: float, rest: int, by: dict[PhaseName, int]) -> float:
    if at < 0.36:
        return rest + (by["forward"] - rest) * at / 0.36
    if at < 0.82:
        return by["forward"] + (by["backward"] - by["forward"]) * math.sin((at - 0.36) / 0.46 * math.pi)
    return by["update"] if at < 0.97 else rest


def losses(strategy: str, steps: int) -> list[float]:
    """The strategies differ in the last digits, by their names."""
    off = 0.0 if strategy == "single" else (len(strategy) % 5) * 6e-8
    return [4.5 * math.exp(-i / 12) + 1.2 + off * (i % 3) for i in range(steps)]


def row(
    strategy: str, quicker: float = 1.0, scale: float = 0.0, method: str = ProfilerSource.method, steps: int = 12
) -> dict[str, Any]:
    """With memory where there is a scale for it."""
    ms = MILLISECONDS[strategy] * quicker / 1e3
    seconds = [[ms * (1 + 0.04 * ((3 * i + j) % 5 - 2)) for i in range(3)] for j in range(3)]
    ranks = 1 if strategy == "single" else 2
    return {
        "strategy": strategy,
        "outcome": "ran",
        "note": "",
        "losses": losses(strategy, steps),
        "parts": {},
        "seconds": seconds,
        "peak_rss": [640 * 2**20] * ranks,
        "started": 4.0,
        "memory": [account(strategy, r, scale, method).model_dump(mode="json") for r in range(ranks)] if scale else [],
    }


def write_example_comparison(
    run: Path,
    *,
    memory: bool = True,
    scale: float = 1.0,
    quicker: float = 1.0,
    fused: bool = False,
    method: str = ProfilerSource.method,
    parameters: int = PARAMETER_COUNT,
    use: str = "/x/char_gpt.py:CharGPT",
    planned: bool = False,
) -> Path:
    """A run folder with six strategies and one that was refused."""
    folder = run / "compare"
    for strategy in MEMORY_BY_STRATEGY:
        at = folder / Strategy.parse(strategy).slug
        at.mkdir(parents=True)
        told = {"backend": strategy.partition("/")[0], "train": {"steps": 12, "optimizer": {"fused": fused}}}
        (at / "config.json").write_text(json.dumps(told), encoding="utf-8")
        start = {"event": "start", "time": 0.0, "parameters": parameters}
        (at / "rank-0.jsonl").write_text(json.dumps(start) + "\n", "utf-8")
    asked = {"task": {"use": use}, "backend": "native", "train": {"steps": 12, "optimizer": {"fused": fused}}}
    (folder / "asked").mkdir()
    (folder / "asked/quickstart.json").write_text(json.dumps(asked), encoding="utf-8")
    refused = {
        "strategy": "accelerate/parameters",
        "outcome": "refused",
        "note": "train.precision: fp64 <cannot> be had",
    }
    data = {
        "of": {
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "machine": {"system": "Linux", "cpu": "A Processor", "cores": 2, "memory": 24 * 2**30},
        },
        "name": "quickstart",
        "out": str(folder),
        "precision": "fp32",
        "samples": 8,
        "ranks": 2,
        "warmup": 2,
        "note": "",
        "interrupted": False,
        "strategies": [*(row(strategy, quicker, scale * memory, method) for strategy in MEMORY_BY_STRATEGY), refused],
    }
    if planned:
        held = {
            strategy: (at, account(strategy, 0, scale).peak.held) for strategy, (at, _) in MEMORY_BY_STRATEGY.items()
        }
        sent = {strategy: sent_by_collective(strategy) for strategy in MEMORY_BY_STRATEGY}
        data["forecast"] = example_forecast(held, sent)
    (folder / "compare.json").write_text(json.dumps(data), encoding="utf-8")
    return run


def example_with_points(page: ComparisonPageData, points: Sequence[tuple[float, float]]) -> ComparisonPageData:
    """The same page with one strategy for each point: its peak in MiB, and its samples a second."""
    backends = ("native", "deepspeed", "accelerate", "horovod", "a_plugin")
    strategies: list[StrategyPageData] = []
    for i, (size, rate) in enumerate(points):
        name = f"{backends[i % 5]}/{SHARDS[i // 5 % 4]}" + (f"+variant{i // 20}" if i >= 20 else "")
        step = PhasePeak(name="update", peak=round(size * 2**20), held={"parameters": round(size * 2**20)})
        known = account("native/nothing", 0).model_copy(update={"phases": (step,)})
        result = page.strategies[1].row.changed(
            strategy=name, seconds=[[page.comparison.samples / rate]], memory=[known]
        )
        strategies.append(replace(page.strategies[1], row=result, memory=[known]))
    return replace(page, strategies=tuple(strategies))


def edit_example_comparison(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same folder, its figures changed."""
    file = run / "compare/compare.json"
    data = json.loads(file.read_text("utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return run
