"""Section of the comparison page on failed strategies: their memory until they failed."""

from __future__ import annotations

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.html.elements import html_section, html_table, paragraph
from unipar.utils.text import format_size


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
    shown: list[Category] = [c for c in CATEGORIES if any(c in phase.held for phase in account.phases)]
    rows = [
        [p.name, format_size(p.peak), *(format_size(p.held[c]) if c in p.held else "–" for c in shown)]
        for p in account.phases
    ]
    head = ["phase", "peak", *(CATEGORY_LABELS[c] for c in shown)]
    where = f" {strategy.row.at}" if strategy.row.at else ""
    reason = strategy.row.note.splitlines()[0] if strategy.row.note else "the reason is not known"
    sentence = f"{strategy.strategy} failed{where}: {reason}"
    return paragraph(sentence), html_table(head, rows, f"{strategy.strategy}, by phase, until it failed", (0,))
