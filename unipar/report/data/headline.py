"""First sentence of a comparison's page: which strategy is smallest, which is fastest, and why."""

from __future__ import annotations

from statistics import quantiles

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.planning.memory_margin import StrategyPeak, describe_no_difference, measure_margin
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.utils.text import first_few, format_duration, format_size

CATEGORY_LABELS: dict[Category, str] = {
    "parameters": "parameters",
    "masters": "master copies",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "averages": "averages of weights",
    "communication": "communication buffers",
    "buffers": "buffers of the model",
    "activations": "activations",
    "temporaries": "temporaries",
    "library": "the library's own",
    "runtime": "runtime",
    "unattributed": "unattributed",
}
"""Names of the categories of memory, as pages show them."""


def comparison_headline(page: ComparisonPageData) -> str:
    """Return the first sentence of the page: the smallest strategy (if memory was measured), then the fastest."""
    parts = [text for text in (describe_smallest_strategy(page), describe_fastest_strategy(page)) if text]
    return "; ".join(parts) + "." if parts else "No strategy finished, so there is nothing to rank."


def strategies_to_rank(strategies: list[StrategyPageData], page: ComparisonPageData) -> list[StrategyPageData]:
    """Return the strategies without the one-process reference, unless it is the only one: it shares with no ranks."""
    others = [strategy for strategy in strategies if strategy.row is not page.comparison.reference]
    return others or strategies


def describe_smallest_strategy(page: ComparisonPageData) -> str:
    """Return which strategy is smallest, by how much, and mostly in which category; "" if memory was not measured.

    If the difference is not of the training (`MemoryMargin`), return that memory does not tell, and from which size on.
    """
    strategies = strategies_to_rank(page.measured_strategies, page)
    if not strategies:
        return ""
    first = strategies[0]
    says = f"{first.strategy} is smallest: {format_size(first.peak)} on its largest rank"
    other = baseline_with_memory(page) or (strategies[1] if len(strategies) > 1 else None)
    if other is first:
        other = strategies[1] if len(strategies) > 1 else None
    if other is None:
        return says
    margin = measure_margin([_strategy_peak(strategy) for strategy in strategies])
    if {first.strategy, other.strategy} <= set(margin.alike):
        larger = [strategy for strategy in strategies if strategy.strategy not in margin.alike]
        which = f"{len(margin.alike)} of the {len(strategies)} strategies" if larger else "these strategies"
        most = f"; {larger[-1].strategy} is largest: {format_size(larger[-1].peak)}" if larger else ""
        return describe_no_difference(margin, which, page.parameters) + most
    if other.peak <= first.peak:
        return says
    moved = category_differences(other, first)
    category = max(moved, key=lambda c: -moved[c])
    before, after = (_bytes_by_category(strategy).get(category, 0) for strategy in (other, first))
    part = 100 * (1 - first.peak / other.peak)
    change = f"{CATEGORY_LABELS[category]} ({format_size(before)} to {format_size(after)})"
    says += f", {part:.0f} % less than {other.strategy}, mostly {change}"
    also = [name for name in margin.alike if name != first.strategy] if first.strategy in margin.alike else []
    return f"{says}, but memory does not tell it from {first_few(also, most=1)} at this size" if also else says


def _strategy_peak(strategy: StrategyPageData) -> StrategyPeak:
    """Return a strategy's peak by category, and the range of its recorded peaks."""
    assert strategy.fullest_account is not None, strategy.strategy
    peaks = strategy.fullest_account.peaks
    return StrategyPeak(
        strategy.strategy, strategy.fullest_account.peak.held, max(peaks, default=0) - min(peaks, default=0)
    )


def describe_fastest_strategy(page: ComparisonPageData) -> str:
    """Return which strategy is fastest, and those whose median is in the middle half of its times; "" if none ran."""
    strategies = strategies_to_rank(page.timed_strategies, page)
    if not strategies:
        return ""
    first, *rest = strategies
    low, high = step_time_quartiles(first)
    ties = [strategy.strategy for strategy in rest if low <= strategy.median_seconds <= high]
    says = f"{first.strategy} is fastest: {format_duration(first.median_seconds)} a step"
    if not ties:
        return says
    return f"{says}, but the difference from {first_few(ties, most=1)} is within noise"


def step_time_quartiles(strategy: StrategyPageData) -> tuple[float, float]:
    """Return the first and third quartile of a strategy's step times, in seconds."""
    if len(strategy.timed) < 2:
        return strategy.median_seconds, strategy.median_seconds
    low, _, high = quantiles(strategy.timed, n=4, method="inclusive")
    return low, high


def baseline_with_memory(page: ComparisonPageData) -> StrategyPageData | None:
    """Return the comparison's baseline strategy, or None if there is none or its memory was not measured."""
    base = page.comparison.baseline
    strategy = page.strategy(base.strategy) if base is not None else None
    return strategy if strategy is not None and strategy.fullest_account is not None else None


def category_differences(before: StrategyPageData, after: StrategyPageData) -> dict[Category, int]:
    """Return by category how many bytes more the second strategy holds at its peak than the first."""
    one, two = _bytes_by_category(before), _bytes_by_category(after)
    return {c: two.get(c, 0) - one.get(c, 0) for c in CATEGORIES if c in one or c in two}


def _bytes_by_category(strategy: StrategyPageData) -> dict[Category, int]:
    assert strategy.fullest_account is not None, strategy.strategy
    return strategy.fullest_account.peak.held
