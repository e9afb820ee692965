"""report.html of a comparison: headline, agreement, memory, losses, times, configs, and how it was measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from unipar.planning.cuda_total import PredictedCudaMemory, total_on_cuda
from unipar.report.charts.bars import draw_step_times
from unipar.report.charts.lines import SHADE_BOUNDS, draw_loss_differences, draw_losses, loss_differences
from unipar.report.charts.pareto import draw_pareto
from unipar.report.data import result_changes as changes
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.headline import comparison_headline, step_time_quartiles
from unipar.report.data.pipeline_data import read_pipeline
from unipar.report.html.elements import (
    Badge,
    BadgeKind,
    bullet_list,
    colour_key,
    columns_table,
    config_differences,
    config_listing,
    describe_machine,
    environment_tables,
    html_figure,
    html_page,
    html_section,
    html_table,
    page_header,
    paragraph,
    repeat_command_block,
)
from unipar.report.pages.devices import devices_section
from unipar.report.pages.failed_strategies import failed_strategies_section
from unipar.report.pages.memory.columns import column_notes, cuda_assumptions, memory_columns
from unipar.report.pages.memory.forecast_section import forecast_section, forecast_worlds_section
from unipar.report.pages.memory.sections import (
    balance_section,
    bridges_section,
    communication_section,
    memory_section,
    step_memory_section,
)
from unipar.report.pages.pipeline_section import pipeline_section
from unipar.report.pages.step_work import step_work_section
from unipar.results.loss_agreement import loss_tolerance
from unipar.results.memory_tables import describe_allocator_settings, largest_account
from unipar.results.result_files import original_config_path
from unipar.results.row import outcome_reason
from unipar.utils.columns import choose_columns
from unipar.utils.text import format_duration, format_size


def render_comparison(page: ComparisonPageData, before: ComparisonPageData | None = None) -> str:
    """Return the page; with `before`, an earlier comparison is shown below this one in tables and figures."""
    mismatches = changes.describe_mismatches(before, page) if before is not None else []
    before = changes.without_incomparable_memory(before, page) if before is not None else None
    sections = [
        memory_section(page, before),
        _strategies(page),
        step_work_section(
            page.comparison,
            choose_columns(page.comparison.columns(), "strategy"),
            {row.strategy: row for row in page.comparison.rows},
        ),
        failed_strategies_section(page),
        devices_section(page),
        _changes_section(page, before),
        bridges_section(page),
        step_memory_section(page, before),
        balance_section(page),
        forecast_section(page),
        forecast_worlds_section(page),
        _losses(page),
        _pareto(page, before),
        _times(page, before),
        pipeline_section((c.strategy, read_pipeline(c.strategy, c.config)) for c in page.strategies),
        communication_section(page),
        _configs(page),
        _method_section(page),
    ]
    return html_page(f"unipar compare: {page.comparison.name}", _head(page, before, mismatches), sections)


def _head(page: ComparisonPageData, before: ComparisonPageData | None, mismatches: Sequence[str]) -> str:
    comparison = page.comparison
    facts = [comparison.describe_ranks()] if comparison.ranks else []
    facts += [comparison.precision, comparison.describe_batch()]
    facts += [f"{page.parameters:,} parameters"] if page.parameters else []
    sure = comparison.reference is not None and any(comparison.agreement(row) is not None for row in comparison.rows)
    kind: BadgeKind = "bad" if comparison.disagreeing_rows else "good" if sure else "open"
    first = comparison.verdict()
    return page_header(
        ["unipar compare", comparison.name, *facts],
        comparison_headline(page),
        mismatches=mismatches,
        since="" if before is None else changes.describe_largest_change(before, page),
        badges=[Badge(kind, line) for line in (first if kind == "bad" else first[:1])],
        where=f"Measured on {describe_machine_and_devices(page)}.",
        worries=[*page.problems, *(before.problems if before is not None else ())],
    )


def describe_machine_and_devices(page: ComparisonPageData) -> str:
    """Return the machine and the devices whose memory was counted, in one line."""
    devices = sorted({a.device.upper() if a.on is None else a.on.name for c in page.strategies for a in c.memory})
    return describe_machine(
        page.machine, page.versions, [f"memory counted on the {' and '.join(devices)}"] if devices else ()
    )


def _strategies(page: ComparisonPageData) -> str:
    comparison, measured = page.comparison, not _has_cuda_predictions(page)
    cuda = any(a.on is not None for c in page.measured_strategies for a in c.memory)
    keys = ("strategy", "agreement", "median_step_s", "factor", f"{comparison.unit}_per_s")
    columns = choose_columns(
        comparison.columns(), *keys, agreement="loss", median_step_s="median step", factor="× time"
    )
    return html_section(
        "strategies",
        "Every strategy",
        columns_table(
            [*columns, *memory_columns(lambda row: row, comparison.rank_count, cuda=cuda, measured=measured)],
            comparison.rows,
            "What each strategy costs, and whether it agrees",
            reason=lambda row: None if row.outcome == "ran" else outcome_reason(row.outcome, row.note),
        ),
        column_notes(cuda=cuda, measured=measured),
    )


def _has_cuda_predictions(page: ComparisonPageData) -> bool:
    """Return whether any figure for CUDA is a prediction."""
    return any(
        isinstance(total_on_cuda(largest_account(c.memory), page.comparison.rank_count(c.row)), PredictedCudaMemory)
        for c in page.measured_strategies
    )


def _changes_section(page: ComparisonPageData, before: ComparisonPageData | None) -> str:
    if before is None:
        return ""
    head = ["strategy", "memory before", "now", "change", "step before", "now", "change"]
    return html_section(
        "changed",
        "Before and after",
        *(paragraph(text, "worry") for text in changes.timing_warnings(before, page)),
        html_table(head, changes.change_rows(before, page), f"Since {before.folder}"),
        config_differences(before.config, page.config),
    )


def _losses(page: ComparisonPageData) -> str:
    ran = [c.row for c in page.strategies if c.row.outcome == "ran" and c.row.losses]
    if not ran:
        return ""
    head = ["step", *(row.strategy for row in ran)]
    rows = [[str(i + 1), *(f"{row.losses[i]:.8g}" for row in ran)] for i in range(len(ran[0].losses))]
    parts = [html_figure(lambda width: draw_losses(page, width), html_table(head, rows, "Loss by step"))]
    if series := loss_differences(page):
        worst = [[n, f"{max(v):.1e}" if max(v) else "identical", str(v.index(max(v)) + 1)] for n, v in series if v]
        bounds = [
            "identical",
            f"< {SHADE_BOUNDS[0]:g}",
            *(f"< {b:g}" for b in SHADE_BOUNDS[1:]),
            f"≥ {SHADE_BOUNDS[-1]:g}",
        ]
        parts += [
            "<h3>Difference from one process</h3>",
            paragraph(
                "Relative to the loss if the loss is above 1. Allowed over the first 20 steps in "
                f"{page.comparison.judged_as}: {loss_tolerance(page.comparison.judged_as):g}; a cross marks a larger "
                "difference."
            ),
            colour_key((f"s{i}", words) for i, words in enumerate(bounds)),
            html_figure(
                lambda width: draw_loss_differences(page, width),
                html_table(
                    ["strategy", "largest difference", "at step"], worst, "The largest difference of each strategy"
                ),
            ),
        ]
    return html_section(
        "losses",
        "Losses",
        paragraph(
            "The dark line is one process, every strategy is drawn over it: where they agree, only one line is visible."
        ),
        *parts,
    )


def _pareto(page: ComparisonPageData, before: ComparisonPageData | None) -> str:
    strategies = [c for c in page.measured_strategies if c.timed]
    if not strategies:
        return ""
    keys = ("strategy", "peak", f"{page.comparison.unit}_per_s")
    columns = choose_columns(page.comparison.columns(), *keys, peak="memory at the peak")
    table = columns_table(columns, [c.row for c in strategies], "Throughput and memory")
    aside = f" {one.strategy}, one process, is not ranked." if (one := page.comparison.reference) is not None else ""
    compared = before is not None and before.measured_strategies
    moved = " A line leads from each strategy's place in the earlier comparison." if compared else ""
    return html_section(
        "pareto",
        "Throughput against memory",
        paragraph(f"Better is up and to the left. Filled: no other strategy beats it in both.{aside}{moved}"),
        html_figure(lambda width: draw_pareto(page, before, width), table),
    )


def _times(page: ComparisonPageData, before: ComparisonPageData | None) -> str:
    if not page.timed_strategies:
        return ""
    rows = [
        [
            c.strategy,
            *(
                format_duration(s)
                for s in (
                    min(c.timed),
                    step_time_quartiles(c)[0],
                    c.median_seconds,
                    step_time_quartiles(c)[1],
                    max(c.timed),
                )
            ),
        ]
        for c in page.timed_strategies
    ]
    head = ["strategy", "fastest", "middle half from", "median", "to", "slowest"]
    below = " Below it, the middle half of the earlier comparison." if before is not None else ""
    return html_section(
        "times",
        "Time of a step",
        paragraph(f"One dot per step, of the slowest rank; the bar is the middle half, the line the median.{below}"),
        html_figure(lambda width: draw_step_times(page, before, width), html_table(head, rows, "Time of a step")),
    )


def _configs(page: ComparisonPageData) -> str:
    whose = "the given config"
    asked = dict(page.config)
    if not asked:
        known = next((c for c in page.strategies if c.config), None)
        if known is None:
            return ""
        asked, whose = dict(known.config), known.strategy
    rows = [
        [c.strategy, key, now]
        for c in page.strategies
        if c.config
        for key, _, now in changes.differing_key_rows(asked, c.config)
    ]
    return html_section(
        "configs",
        "Configs",
        html_table(["strategy", "key", "is"], rows, f"Where a strategy's config differs from {whose}", (0, 1, 2))
        if rows
        else "",
        config_listing(asked, f"All keys of {whose}"),
    )


def _method_section(page: ComparisonPageData) -> str:
    accounts = [(c, a) for c in page.strategies if (a := c.fullest_account) is not None]
    methods = sorted({a.method for _, a in accounts})
    keeps = (
        ["before the timed steps malloc is set to keep what is freed"]
        if describe_allocator_settings(a for _, a in accounts)
        else []
    )
    notes = sorted({f"{c.strategy}: {note}" for c, a in accounts for note in a.notes})
    saved = [[c.strategy, *(format_size(s) for s in a.saved)] for c, a in accounts if a.saved is not None]
    asked = [f"--strategy {shlex.quote(c.strategy)}" for c in page.strategies if c.row is not page.comparison.rows[0]]
    config, out = original_config_path(page.folder, page.comparison.name), page.folder.parent
    places = [shlex.quote(str(config)), f"--out {shlex.quote(str(out))}"]
    command = ["unipar compare", *places, *asked, "--overwrite"]
    return html_section(
        "how",
        "How it was measured",
        bullet_list([*methods, *page.comparison.remarks(work=False), *keeps, *notes]),
        html_table(["strategy", "by lifetime", "as autograd saved them"], saved, "Activations at the end of a forward")
        if saved
        else "",
        cuda_assumptions() if _has_cuda_predictions(page) else "",
        environment_tables(page.machine, page.versions),
        repeat_command_block(" ".join(command) if page.config and page.folder.name == "compare" else ""),
    )
