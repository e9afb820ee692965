"""Scalings made by hand."""

from __future__ import annotations

from typing import Any

from tests.support.comparisons import account
from unipar.profiling.work import RankWork
from unipar.results.row import StrategyResult
from unipar.results.scaling import ScaledStrategy, Scaling, ScalingKind

# What the figures say


def timed(
    strategy: str, ranks: int, seconds: float, *kinds: ScalingKind, off: float = 0.0, memory: bool = False
) -> Any:
    samples = 8 * ranks if kinds == ("weak",) else 8
    share = samples // ranks
    world = ScaledStrategy(strategy=strategy, ranks=ranks, kinds=kinds, samples=samples, micro=share, accumulate=1)
    held = [account(strategy, rank) for rank in range(ranks)] if memory else []
    losses = [1.0 + off, 0.5]
    turns, rss = [[seconds, seconds], [seconds]], [2**20 * 100] * ranks
    return world, StrategyResult(
        strategy=world.name, outcome="ran", losses=losses, seconds=turns, peak_rss=rss, memory=held
    )


def made(*found: Any, **changed: Any) -> Scaling:
    told: dict[str, Any] = {
        "name": "x",
        "out": "runs/x/scale",
        "precision": "fp32",
        "cores": 2,
        "threads": "1",
        "device": "cpu",
        "warmup": 2,
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "A Processor", "cores": 2},
    }
    worlds, rows = zip(*found, strict=True)
    return Scaling(**told | changed, worlds=worlds, rows=list(rows))


def one_strategy() -> Scaling:
    """Alone, on two ranks, both ways."""
    return made(
        timed("native/nothing", 1, 0.080, "strong", "weak"),
        timed("native/nothing", 2, 0.050, "strong"),
        timed("native/nothing", 2, 0.100, "weak"),
    )


def with_work(world: Any, *shares: float, flops: float | None, device: str = "") -> Any:
    """The world with 64 tokens for each sample, and the share of a step for which each rank waits."""
    scaled, row = world
    weights = (64.0 * scaled.samples,) * 5
    ranks = [
        RankWork(flops=flops, weights=weights, waits=((share, 1.0),), device=device, device_id=f"{device}{rank}")
        for rank, share in enumerate(shares)
    ]
    return scaled, row.changed(work=ranks)


def worlds_with_work(device: str = "", **changed: Any) -> Scaling:
    """One rank, and two, whose operations were not counted with strong scaling."""
    return made(
        with_work(timed("native/nothing", 1, 0.080, "strong", "weak"), 0.0, flops=8e9, device=device),
        with_work(timed("native/nothing", 2, 0.050, "strong"), 0.05, 0.1, flops=None, device=device),
        with_work(timed("native/nothing", 2, 0.100, "weak"), 0.2, 0.3, flops=16e9, device=device),
        **changed,
    )


def two_strategies() -> Scaling:
    """On one rank and on two, with memory."""
    return made(
        timed("native/nothing", 1, 0.080, "strong", "weak", memory=True),
        timed("native/nothing", 2, 0.050, "strong", memory=True),
        timed("native/nothing", 2, 0.100, "weak", memory=True),
        timed("native/parameters", 1, 0.080, "strong", "weak", memory=True),
        timed("native/parameters", 2, 0.045, "strong", memory=True),
        timed("native/parameters", 2, 0.160, "weak", memory=True),
    )
