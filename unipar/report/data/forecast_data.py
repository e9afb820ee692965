"""Lines of a forecast: strategies whose predicted peaks are about the same on every number of ranks share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unipar.results.forecast.records import Forecast, StrategyForecast

SAME_LINE: Final = 0.01
"""Share by which peaks may differ on every number of ranks for two strategies to share a line."""


@dataclass(frozen=True)
class ForecastLine:
    """Predicted peaks by number of ranks, of one strategy or of several."""

    strategies: tuple[str, ...]
    peaks: dict[int, int]

    def label(self, most: int) -> str:
        """Return the names in at most this many letters if possible: all, or the first and a count."""
        names = ", ".join(self.strategies)
        return (
            names
            if len(names) <= most or len(self.strategies) == 1
            else f"{self.strategies[0]} and {len(self.strategies) - 1} more"
        )

    def follows(self, strategy: StrategyForecast) -> bool:
        """Return whether the strategy's peaks are about those of the line."""
        peaks = peaks_by_ranks(strategy)
        return peaks.keys() == self.peaks.keys() and all(
            abs(peak - self.peaks[ranks]) <= SAME_LINE * self.peaks[ranks] for ranks, peak in peaks.items()
        )


def peaks_by_ranks(strategy: StrategyForecast) -> dict[int, int]:
    """Return the strategy's predicted peaks by number of ranks, where it has one."""
    return {world.ranks: world.peak or 0 for world in strategy.planned_worlds}


def forecast_lines(forecast: Forecast) -> list[ForecastLine]:
    """Return the lines of all strategies that were planned, in the order of the strategies."""
    lines: list[ForecastLine] = []
    for strategy in forecast.strategies:
        if not (peaks := peaks_by_ranks(strategy)):
            continue
        at = next((i for i, line in enumerate(lines) if line.follows(strategy)), None)
        if at is None:
            lines.append(ForecastLine((strategy.strategy,), peaks))
        else:
            lines[at] = ForecastLine((*lines[at].strategies, strategy.strategy), lines[at].peaks)
    return lines


def ranks_with_other_batch(forecast: Forecast) -> list[int]:
    """Return the numbers of ranks on which some strategy was planned with another total batch than the compared one."""
    other = (w for strategy in forecast.strategies for w in strategy.planned_worlds if w.samples != forecast.samples)
    return sorted({world.ranks for world in other})
