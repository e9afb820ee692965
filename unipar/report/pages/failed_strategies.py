"""Section of the comparison page on failed strategies: their memory until they failed."""

from __future__ import annotations

from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.html.elements import html_section, paragraph
from unipar.report.pages.memory.columns import phase_table


def failed_strategies_section(page: ComparisonPageData) -> str:
    """Return the section, or "" if no failed strategy has a memory account."""
    if not page.failed_strategies:
        return ""
    return html_section(
        "till",
        "Until it failed",
        paragraph("These strategies did not finish, and are not ranked."),
        *(part for strategy in page.failed_strategies for part in _failed_strategy_parts(strategy)),
    )


def _failed_strategy_parts(strategy: StrategyPageData) -> tuple[str, str]:
    account = strategy.fullest_account
    assert account is not None
    where = f" {strategy.row.at}" if strategy.row.at else ""
    reason = strategy.row.note.splitlines()[0] if strategy.row.note else "the reason is not known"
    sentence = f"{strategy.strategy} failed{where}: {reason}"
    return paragraph(sentence), phase_table(account.phases, f"{strategy.strategy}, by phase, until it failed")
