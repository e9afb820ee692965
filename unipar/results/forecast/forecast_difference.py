"""`ForecastDifference`: a strategy's predicted peak and bytes sent beside the measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from unipar.backend import Category
from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.results.forecast.records import NOT_PLANNED, Forecast, StrategyForecast
from unipar.utils.columns import Column
from unipar.utils.text import format_size, join_with_and

BytesByAxis = Mapping[str, Mapping[str, int]]
"""Bytes of one step by axis of the mesh, then collective."""


class ComparedRow(Protocol):
    """Row of a comparison: a strategy, what became of it, and the memory account of each rank."""

    @property
    def strategy(self) -> str: ...

    @property
    def outcome(self) -> str: ...

    @property
    def memory(self) -> Sequence[MemoryAccount]: ...


@dataclass(frozen=True)
class MeasuredStep:
    """Measured memory of the fullest rank in its steps, without the categories that no plan has."""

    phase: str
    """The fullest phase of a step; setting up is none."""

    low: int
    """Lowest peak of a recorded step."""

    high: int
    """Highest peak of a recorded step."""

    held: Mapping[Category, int]
    """Bytes by category in the fullest phase."""

    sent: BytesByAxis | None
    """Bytes sent in one step; None if it was not recorded."""

    across: int = 0
    """Bytes of it in groups on several machines, of the rank that has most of them."""

    @property
    def peak(self) -> int:
        """Bytes in the fullest phase."""
        return sum(self.held.values())


def measured_step(accounts: Sequence[MemoryAccount]) -> MeasuredStep | None:
    """Return the steps of the fullest rank, or None if no account has any."""
    steps = [(phase, account) for account in accounts for phase in account.phases if phase.name != "built"]
    if not steps:
        return None
    full, account = max(steps, key=lambda each: sum(_planned_categories(each[0]).values()))
    held = _planned_categories(full)
    own = max(phase.peak for phase in account.phases if phase.name != "built") - sum(held.values())
    peaks = account.peaks or (full.peak,)
    return MeasuredStep(
        full.name,
        min(peaks) - own,
        max(peaks) - own,
        held,
        account.sent_along if account.sent_by or len(accounts) == 1 else None,
        max(each.sent_across for each in accounts),
    )


def _planned_categories(phase: PhasePeak) -> Mapping[Category, int]:
    """Return bytes of the categories that plans have, when their sum is highest, or at the peak in older files."""
    held = phase.tensors or phase.held
    return {category: size for category, size in held.items() if category not in NOT_PLANNED}


@dataclass(frozen=True)
class ForecastDifference:
    """Predictions for a strategy that was measured."""

    planned: StrategyForecast
    measured: MeasuredStep

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self.planned.strategy

    @property
    def off(self) -> float:
        """Distance of the predicted peak from the range of the measured ones, as a share of it."""
        peak, low, high = self.planned.peak.peak, self.measured.low, self.measured.high
        if low <= peak <= high:
            return 0.0
        nearest = low if peak < low else high
        return peak / nearest - 1.0 if nearest > 0 else 1.0

    @property
    def same_volume(self) -> bool | None:
        """Whether the predicted bytes sent are the measured ones to the byte; None if one of them is not known."""
        if self.measured.sent is None or (not _flat(self.planned.sent) and _flat(self.measured.sent)):
            return None
        across = self.planned.sent_across == self.measured.across
        return across and _flat(self.planned.sent) == _flat(self.measured.sent)

    @property
    def planned_bytes_sent(self) -> int:
        """Predicted bytes sent in one step."""
        return sum(_flat(self.planned.sent).values())

    @property
    def measured_bytes_sent(self) -> int | None:
        """Measured bytes sent in one step, or None if it was not recorded."""
        return None if self.measured.sent is None else sum(_flat(self.measured.sent).values())

    def differing_volumes(self) -> Iterator[tuple[str, int, int]]:
        """Yield axis and collective, bytes predicted and bytes measured, where these differ."""
        planned, measured = _flat(self.planned.sent), _flat(self.measured.sent or {})
        for name in sorted({*planned, *measured}):
            if (one := planned.get(name, 0)) != (other := measured.get(name, 0)):
                yield " ".join(name), one, other
        if self.planned.sent_across != self.measured.across:
            yield "between machines", self.planned.sent_across, self.measured.across


def _flat(sent: BytesByAxis) -> dict[tuple[str, str], int]:
    return {(axis, kind): size for axis, kinds in sent.items() for kind, size in kinds.items() if size}


FORECAST_COLUMNS: Final[Sequence[Column[ForecastDifference]]] = (
    Column("predicted", lambda each: each.planned.peak.peak, format_size, key="planned_peak"),
    Column("measured", lambda each: each.measured.high, format_size, key="measured_peak"),
    Column("sent, predicted", lambda each: each.planned_bytes_sent, format_size, key="planned_sent"),
    Column(
        "sent, measured",
        lambda each: each.measured_bytes_sent,
        lambda sent: format_size(sent) if sent else "nothing",
        key="measured_sent",
    ),
)
"""Predicted and measured bytes of the fullest rank; measured without what libraries and Python hold for themselves."""


def forecast_differences(forecast: Forecast | None, rows: Sequence[ComparedRow]) -> list[ForecastDifference]:
    """Return the strategies that ran, and were planned and measured, in the order of the rows."""
    differences: list[ForecastDifference] = []
    for row in rows if forecast is not None else ():
        assert forecast is not None
        planned, measured = forecast.strategy(row.strategy), measured_step(row.memory)
        if row.outcome == "ran" and planned is not None and planned.phases and measured is not None:
            differences.append(ForecastDifference(planned, measured))
    return differences


def describe_forecast(forecast: Forecast | None, rows: Sequence[ComparedRow]) -> list[str]:
    """Return sentences on how near the predictions are, for the lines below a table."""
    if forecast is None:
        return []
    if forecast.problem:
        return [f"plan: {forecast.problem}"]
    lines = [f"plan: {sentence}" for sentence in describe_refusals(forecast)]
    differences = forecast_differences(forecast, rows)
    if not differences:
        planned = any(strategy.phases for strategy in forecast.strategies)
        return ["plan: no memory was measured to compare predictions with; they are on the page"] * planned + lines
    return [f"plan: {summarise_differences(differences)}", *lines]


def describe_refusals(forecast: Forecast) -> list[str]:
    """Return a sentence, without its full stop, for each reason why strategies are not planned."""
    strategies: dict[str, list[str]] = {}
    for strategy in forecast.strategies:
        if strategy.refusal:
            strategies.setdefault(strategy.refusal.removeprefix("plan: "), []).append(strategy.strategy)
    return [
        f"{join_with_and(names)} {'is' if len(names) == 1 else 'are'} not planned: {why}"
        for why, names in strategies.items()
    ]


def summarise_differences(differences: Sequence[ForecastDifference]) -> str:
    """Return a sentence, without its full stop, on how far predictions are from what was measured."""
    worst = max(differences, key=lambda each: abs(each.off))
    strategies = f"{len(differences)} strategies" if len(differences) > 1 else worst.strategy
    near = f"predicted peaks of {strategies} are within {abs(worst.off) * 100:.2f} % of the measured ones"
    if len(differences) > 1 and abs(worst.off) >= 0.00005:
        near += f" (farthest: {worst.strategy})"
    known = [each for each in differences if each.same_volume is not None]
    other = [each.strategy for each in known if not each.same_volume]
    if other:
        return f"{near}; other bytes are sent than predicted in {', '.join(other)}"
    return near + "; bytes sent are equal" * any(each.planned_bytes_sent for each in known)
