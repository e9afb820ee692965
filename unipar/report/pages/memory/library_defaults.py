"""Footnote † of the memory figure: what the library's default sizes cost."""

from __future__ import annotations

from dataclasses import replace

from unipar.config import Config, Strategy
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.data.headline import CATEGORY_LABELS, category_differences
from unipar.utils.text import format_size


def library_default_note(page: ComparisonPageData, strategy: StrategyPageData) -> str:
    """Return `strategy`'s peak beside that without the defaults and with torch alone, if measured."""
    says = f"† {strategy.strategy} runs {strategy.says}, its default"
    if strategy not in page.measured_strategies:
        return f"{says}."
    says += f": {format_size(strategy.peak)}"
    torch_alone = str(Strategy(Config.model_fields["backend"].default))  # default backend, nothing sharded
    without, plain = (
        next((c for c in page.measured_strategies if c.strategy == name), None)
        for name in (str(replace(Strategy.parse(strategy.strategy), variant=None)), torch_alone)
    )
    beside = [(without, " without them")] if without is not None else []
    beside += [(plain, "")] if plain is not None else []
    if not beside:
        return f"{says}."
    times = [f"{strategy.peak / c.peak:.1f} times {c.strategy}{words} ({format_size(c.peak)})" for c, words in beside]
    return f"{says}, {' and '.join(times)}{_describe_largest_category(strategy, beside[0][0], plain)}."


def _describe_largest_category(
    strategy: StrategyPageData, other: StrategyPageData, plain: StrategyPageData | None
) -> str:
    """Return the category that grew most from `other` to `strategy`; "" if the peak did not grow."""
    moved = category_differences(other, strategy)
    category = max(moved, key=lambda c: moved[c])
    if moved[category] <= 0 or strategy.peak <= other.peak:
        return ""
    assert strategy.fullest_account is not None
    says = f"; {format_size(strategy.fullest_account.peak.held[category])} of it are {CATEGORY_LABELS[category]}"
    # communication buffers are explained by the gradients that they carry, which are whole in the plain strategy
    if category != "communication" or plain is None or plain.fullest_account is None:
        return says
    gradients = max(phase.held.get("gradients", 0) for phase in plain.fullest_account.phases)
    return f"{says}, for {format_size(gradients)} of gradients" if gradients else says
