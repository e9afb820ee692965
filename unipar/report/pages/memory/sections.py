"""Sections of the comparison page on memory and communication: peak, bridges, through a step, balance, bytes sent."""

from __future__ import annotations

from typing import Final

from unipar.backend import Category
from unipar.config import Strategy
from unipar.errors import ConfigError
from unipar.memory.account import MEMORY_PHASES, PhasePeak
from unipar.report.charts.bars import choose_bar_scale, draw_bridge, draw_memory_bars, draw_rank_balance
from unipar.report.charts.lines import draw_memory_through_step, strategies_with_curves
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.data.headline import CATEGORY_LABELS, baseline_with_memory, category_differences, strategies_to_rank
from unipar.report.html.elements import (
    NO_VALUE,
    colour_key,
    columns_table,
    escape,
    html_figure,
    html_section,
    html_table,
    paragraph,
)
from unipar.report.pages.memory.columns import held_categories, phase_columns
from unipar.report.pages.memory.library_defaults import library_default_note
from unipar.results.memory_tables import bytes_along, describe_setup_peaks, sends_across, sent_axes
from unipar.utils.columns import Column
from unipar.utils.text import format_size

_STAGES_DIFFER: Final = (
    " Stages of a pipeline hold different things: other blocks, the first the embedding, the last the head and the "
    "logits; and under 1f1b an earlier stage keeps the activations of more microbatches. In tables such a strategy "
    "counts with its fullest rank."
)
"""Explanation of differences between ranks that are in the nature of a pipeline."""


def _peak(strategy: StrategyPageData) -> PhasePeak:
    assert strategy.fullest_account is not None
    return strategy.fullest_account.peak


def _key(page: ComparisonPageData) -> str:
    """Return the legend of colours, in the order in which categories are drawn."""
    return colour_key((f"c-{c}", CATEGORY_LABELS[c]) for c in _categories_at_peak(page))


def _categories_at_peak(page: ComparisonPageData) -> list[Category]:
    """Return the categories that any strategy holds at its peak."""
    return held_categories(_peak(strategy).held for strategy in page.measured_strategies)


def memory_section(page: ComparisonPageData, before: ComparisonPageData | None) -> str:
    """Return the section on memory at the peak by category, or a sentence that memory was not measured."""
    title = "Memory at the peak"
    if not page.measured_strategies:
        return html_section(
            "memory", title, paragraph("Memory was not measured in this comparison: no strategy has a memory account.")
        )
    missing = [c.strategy for c in page.strategies if c.row.outcome == "ran" and c.fullest_account is None]
    strategy = Column[StrategyPageData]("strategy", lambda strategy: strategy.strategy, right=False)
    phases = [column.of(_peak) for column in phase_columns([_peak(c) for c in page.measured_strategies])]
    table = columns_table([strategy, *phases], page.measured_strategies, "Bytes by category at the peak")
    setup_peaks = describe_setup_peaks((c.strategy, c.memory) for c in page.measured_strategies)
    return html_section(
        "memory",
        title,
        paragraph(
            "Peak of the memory that the fullest rank allocated, beyond what it held before training. "
            + ("The thin bar is the earlier comparison." if before is not None and before.measured_strategies else "")
        ),
        _key(page),
        paragraph(_describe_cuts("A bar", page, before)),
        html_figure(lambda width: draw_memory_bars(page, before, width), table),
        *(paragraph(library_default_note(page, c), "own") for c in page.strategies if c.is_library_default),
        *(paragraph(f"{line}.", "own") for line in setup_peaks),
        paragraph(f"Not measured: {', '.join(missing)}." if missing else ""),
    )


def _describe_cuts(what: str, page: ComparisonPageData, before: ComparisonPageData | None) -> str:
    """Return a sentence on the strategies whose bars are cut, or ""."""
    names = choose_bar_scale(page, before)[1]
    cut = [f"{c.strategy} holds {format_size(c.peak)}" for c in page.measured_strategies if c.strategy in names]
    return f"{what} with a gap is cut short, so that all others stay readable: {', '.join(cut)}." if cut else ""


def bridges_section(page: ComparisonPageData) -> str:
    """Return the section on each strategy's difference in memory from the baseline, or "" without a baseline."""
    base = baseline_with_memory(page)
    others = [c for c in strategies_to_rank(page.measured_strategies, page) if c is not base]
    if base is None or not others:
        return ""

    def one(strategy: StrategyPageData) -> str:
        moved = [
            [CATEGORY_LABELS[c], f"{'−' if d < 0 else '+'}{format_size(abs(d))}"]
            for c, d in category_differences(base, strategy).items()
        ]
        table = html_table(["category", "difference"], moved, f"From {base.strategy} to {strategy.strategy}")
        return html_figure(lambda width: draw_bridge(base, strategy, width), table)

    first, *rest = others
    return html_section(
        "bridge",
        "Which bytes moved where",
        paragraph(
            f"From {base.strategy} to {first.strategy}, the smallest other strategy: "
            "each row begins where the previous one ended."
        ),
        one(first),
        *(
            f"<details><summary>From {escape(base.strategy)} to {escape(c.strategy)}</summary>{one(c)}</details>"
            for c in rest
        ),
    )


def step_memory_section(page: ComparisonPageData, before: ComparisonPageData | None) -> str:
    """Return the section on memory during a step, or "" if no strategy has a curve."""
    drawn = strategies_with_curves(page.measured_strategies)
    if not drawn:
        return ""
    peaks = [(c.strategy, {phase.name: format_size(phase.peak) for phase in a.phases}) for c, a in drawn]
    rows = [[strategy, *(by_phase.get(name, NO_VALUE) for name in MEMORY_PHASES)] for strategy, by_phase in peaks]
    dashed = " Dashed: the earlier comparison." if before is not None else ""
    return html_section(
        "through",
        "Memory through a step",
        paragraph(
            "Memory of the fullest rank during one step: phases are as long as in a step without recording, "
            f"allocations are spread evenly within each. Panels share one scale, except where noted.{dashed}"
        ),
        html_figure(
            lambda width: draw_memory_through_step(page, before, width),
            html_table(["strategy", *MEMORY_PHASES], rows, "Peak of each phase"),
        ),
    )


def balance_section(page: ComparisonPageData) -> str:
    """Return the section on differences in memory between ranks, or "" if no strategy has several accounts."""
    if not any(len(c.memory) > 1 for c in page.measured_strategies):
        return ""
    ranks = sorted({a.rank for c in page.measured_strategies for a in c.memory})
    rows = [
        [c.strategy, *(next((format_size(a.peak.peak) for a in c.memory if a.rank == r), NO_VALUE) for r in ranks)]
        for c in page.measured_strategies
    ]
    return html_section(
        "balance",
        "Balance between ranks",
        paragraph(
            "One dot per rank; at the right, how much more the fullest rank holds than the emptiest."
            + _STAGES_DIFFER * any(_has_stages(c.strategy) for c in page.measured_strategies)
        ),
        paragraph(_describe_cuts("A row", page, None)),
        html_figure(
            lambda width: draw_rank_balance(page, width),
            html_table(["strategy", *(f"rank {r}" for r in ranks)], rows, "Peak by rank"),
        ),
    )


def _has_stages(strategy: str) -> bool:
    try:
        return Strategy.parse(strategy).axes.pipeline > 1
    except ConfigError:  # a name from outside
        return False


def communication_section(page: ComparisonPageData) -> str:
    """Return the section on what a step sends by collective, or "" if nothing is known of it."""
    kinds = sorted({kind for c in page.measured_strategies for a in c.memory for kind in a.sent})
    if not kinds:
        return ""
    known = [
        (c.strategy, max(c.memory, key=lambda a: sum(a.sent.values()))) for c in page.measured_strategies if c.memory
    ]
    rows = [[strategy, *(format_size(a.sent[k]) if k in a.sent else NO_VALUE for k in kinds)] for strategy, a in known]
    columns, between = ["strategy", *kinds], ""
    if sends_across(a for c in page.measured_strategies for a in c.memory):
        columns.append("between machines")
        for row, (_, account) in zip(rows, known, strict=True):
            row.append(format_size(account.sent_across) if account.sent_across else NO_VALUE)
        between = " Between machines: those of them in calls whose ranks are on several machines, the whole tensor too."
    ways = {
        a.sent_by: [strategy for strategy, b in known if b.sent and b.sent_by == a.sent_by]
        for _, a in known
        if a.sent_by
    }
    return html_section(
        "sent",
        "What a step sends",
        html_table(columns, rows, "Bytes sent in one step by collective"),
        _sent_by_axis(page),
        paragraph(
            "Each call counts with its whole tensor: the larger of what a rank gives and what it gets; a tensor that "
            "goes from one rank to another counts where it is sent. By collective: of the rank that sends most."
            + between,
            "note",
        ),
        *(paragraph(f"{', '.join(strategies)}: by {way}.", "note") for way, strategies in ways.items()),
    )


def _sent_by_axis(page: ComparisonPageData) -> str:
    """Return a table of what each rank sends along each axis, or "" if no strategy has axes beside the data's."""
    axes = sent_axes(a for c in page.measured_strategies for a in c.memory)
    if not axes:
        return ""
    rows: list[list[str]] = []
    for strategy in page.measured_strategies:
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        for account in strategy.memory:
            if account.sent:
                ranks_of.setdefault(tuple(bytes_along(account, axis) for axis in axes), []).append(account.rank)
        for sizes, ranks in ranks_of.items():
            which = "all" if len(ranks) == len(strategy.memory) else ", ".join(map(str, ranks))
            rows.append([strategy.strategy, which, *(format_size(size) if size else NO_VALUE for size in sizes)])
    return html_table(["strategy", "ranks", *axes], rows, "Bytes sent in one step by axis of the mesh", (0, 1))
