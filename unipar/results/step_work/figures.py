"""`StepFigures`: what a step of one strategy does, from what its ranks recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from unipar.config import Precision
from unipar.planning.machines.device_peaks import find_device_peaks
from unipar.profiling.work import CompiledWork, RankWork


@dataclass(frozen=True)
class StepFigures:
    """Figures of one strategy; None where they are unknown, or do not exist."""

    tokens_per_second: float | None = None
    """Units of the task's weight a second, all ranks together; None if the task has no weight of its own."""

    flops_per_second: float | None = None
    """Operations a second of all ranks together."""

    mfu: float | None = None
    """FLOPs a second in proportion to the peak of all devices."""

    waiting: float | None = None
    """Share of a step in which the rank that waits least waits for communication."""

    most_waiting: float | None = None
    """The same of the rank that waits most, which also waits for slower ranks."""

    compiled: CompiledWork | None = None
    """Compiled work of the rank with most graph breaks and recompiles."""


StrategyWork = tuple[str, Sequence[RankWork]]
"""Name of a strategy, and the work of its ranks."""


def step_figures(
    work: Sequence[RankWork], seconds: Sequence[float], flops: float | None, precision: Precision
) -> StepFigures:
    """Return the figures of a strategy, from the seconds of its timed steps, which are the last ones.

    `flops`: operations of one step, which are the same in every strategy.
    """
    if not seconds:
        return StepFigures()
    middle = median(seconds)
    rate = None if flops is None else flops / middle
    peak = peak_of_devices(work, precision)
    waits = [rank.waiting for rank in work if rank.waiting is not None] if len(work) > 1 else []
    compiled = [rank.compiled for rank in work if rank.compiled is not None]
    return StepFigures(
        tokens_per_second=_tokens_per_second(work, seconds),
        flops_per_second=rate,
        mfu=rate / peak if rate is not None and peak is not None else None,
        waiting=min(waits) if waits and len(waits) == len(work) else None,
        most_waiting=max(waits) if waits and len(waits) == len(work) else None,
        compiled=max(compiled, key=lambda counts: counts.break_count + counts.recompile_count, default=None),
    )


def flops_of_step(strategies: Iterable[StrategyWork]) -> float | None:
    """Return the operations of one step of strategies with the same batch, by the first one with a count."""
    return next((rank.flops for _, work in strategies for rank in work[:1] if rank.flops is not None), None)


def differing_counts(strategies: Sequence[StrategyWork]) -> list[str]:
    """Return the strategies whose operations were counted otherwise than those of the first, each with its number."""
    flops = flops_of_step(strategies)
    counted = [(strategy, rank.flops) for strategy, work in strategies for rank in work[:1] if rank.flops is not None]
    return [
        f"{strategy} {value:.6g}"
        for strategy, value in counted
        if flops is not None and abs(value - flops) > flops / 1e6
    ]


def peak_of_devices(work: Sequence[RankWork], precision: Precision) -> float | None:
    """Return the operations a second of all devices of these ranks at most, or None if one of them is not known."""
    names = {rank.device_id or str(number): rank.device for number, rank in enumerate(work)}
    peaks = [find_device_peaks(name) if name else None for name in names.values()]
    most = [None if peak is None else peak.flops.get(precision) for peak in peaks]
    known = [number for number in most if number is not None]
    return sum(known) if known and len(known) == len(most) else None


def _tokens_per_second(work: Sequence[RankWork], seconds: Sequence[float]) -> float | None:
    weights = work[0].weights[-len(seconds) :] if work else ()
    if len(weights) != len(seconds):
        return None
    return median(weight / took for weight, took in zip(weights, seconds, strict=True))
