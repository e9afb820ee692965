"""Which of the planned strategies to take: what fits, then the fastest, then the simplest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from unipar.planning.planned_strategy import PlannedStrategy
from unipar.planning.speed import describe_speed
from unipar.utils.text import format_size

AS_FAST: Final = 0.02
"""Share of the best rate within which two strategies count as equally fast; the simpler one is taken."""


@dataclass(frozen=True)
class Recommendation:
    """The strategy to take on a number of ranks, and why."""

    ranks: int
    row: PlannedStrategy | None
    """None if nothing fits."""

    micro: int
    """Samples of a microbatch that fit."""

    reason: str
    """Reason, as a sentence without its full stop."""

    shares: str = ""
    """Shares of a step, in words; empty if its seconds are not known."""

    @property
    def why(self) -> str:
        """The reason, and the shares of a step."""
        return f"{self.reason}: {self.shares}" if self.shares else self.reason


def recommend(
    rows: Sequence[PlannedStrategy], limit: int | None, *, exclude: Iterable[str] = ()
) -> list[Recommendation]:
    """Return a recommendation for each number of ranks; `limit`: bytes that a rank may use."""
    excluded = frozenset(exclude)
    allowed = [row for row in rows if not row.refusal and row.strategy not in excluded]
    numbers = sorted({row.ranks for row in rows})
    return [_for_ranks([row for row in allowed if row.ranks == ranks], ranks, limit) for ranks in numbers]


def _for_ranks(rows: Sequence[PlannedStrategy], ranks: int, limit: int | None) -> Recommendation:
    if not rows:
        return Recommendation(ranks, None, 0, "no strategy can be planned here")
    fitting = [row for row in rows if limit is None or row.largest is not None]
    if not fitting:
        assert limit is not None
        least = min(rows, key=lambda row: row.least or row.needed)
        lack = format_size((least.least or least.needed) - limit)
        return Recommendation(
            ranks, None, 0, f"nothing fits; {least.strategy} comes nearest, and needs {lack} more, whatever the micro"
        )
    rates = {row.strategy: speed.rate for row in fitting if (speed := row.speed_of_fitting(limit)) is not None}
    fast = fitting
    if rates:
        best = max(rates.values())
        fast = [row for row in fitting if rates.get(row.strategy, 0.0) >= best * (1.0 - AS_FAST)]
    row = min(fast, key=lambda row: row.simplicity)
    speed = row.speed_of_fitting(limit)
    shares = "" if speed is None else describe_speed(speed)
    return Recommendation(ranks, row, row.fitting_micro(limit), _reason(row, fitting, fast, limit), shares)


def _reason(
    row: PlannedStrategy, fitting: Sequence[PlannedStrategy], fast: Sequence[PlannedStrategy], limit: int | None
) -> str:
    fits = "" if limit is None else f"it fits ({format_size(row.peak_of_fitting(limit))} of {format_size(limit)})"
    if row.speed_of_fitting(limit) is None:
        simplest = f"the simplest of {len(fitting)} strategies" + (" that fit" if limit is not None else "")
        if len(fitting) == 1:
            simplest = "the only strategy that does" if fits else "the only strategy"
        return f"{fits}, and is {simplest}" if fits else f"it is {simplest}"
    parts = [fits] if fits else []
    if len(fast) > 1:
        parts.append(f"it is the simplest of {len(fast)} that are within {AS_FAST:.0%} of the fastest")
    elif len(fitting) > 1:
        parts.append(f"it is the fastest of {len(fitting)}")
    return ", and ".join(parts) or "it is the only one"
