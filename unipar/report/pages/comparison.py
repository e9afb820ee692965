"""report.html: one page that needs nothing else, no network and no script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import median

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, MEMORY_PHASES
from unipar.memory.cuda_total import PredictedCudaMemory, total_on_cuda
from unipar.report.charts.bars import (
    choose_bar_scale,
    draw_bridge,
    draw_memory_bars,
    draw_rank_balance,
    draw_step_times,
)
from unipar.report.charts.lines import (
    SHADE_BOUNDS,
    cells_with_curves,
    draw_loss_differences,
    draw_losses,
    draw_memory_through_step,
    draw_pareto,
    loss_differences,
)
from unipar.report.data import changes
from unipar.report.data.comparison import CellPageData, ComparisonPageData
from unipar.report.data.headline import (
    CATEGORY_LABELS,
    baseline_with_memory,
    category_differences,
    cells_to_rank,
    comparison_headline,
    step_time_quartiles,
)
from unipar.report.pages.devices import devices_section
from unipar.report.pages.elements import (
    bullet_list,
    config_listing,
    describe_machine,
    environment_tables,
    escape,
    html_figure,
    html_page,
    html_section,
    html_table,
    keep_units_together,
    paragraph,
    repeat_command_block,
)
from unipar.report.pages.failed_cells import failed_cells_section
from unipar.report.pages.library_defaults import library_default_note
from unipar.report.pages.memory_columns import column_notes, cuda_assumptions, memory_cells, memory_column_heads
from unipar.results.agreement import loss_tolerance
from unipar.results.files import original_config_path
from unipar.results.memory_tables import describe_allocator_settings, largest_account
from unipar.results.row import OUTCOME_PREFIXES
from unipar.utils.text import count_of, format_duration, format_size

_NO_VALUE = "–"


def render_comparison(told: ComparisonPageData, before: ComparisonPageData | None = None) -> str:
    """All of it; with `before`, an earlier comparison laid below this one."""
    apart = changes.describe_mismatches(before, told) if before is not None else []
    before = changes.without_incomparable_memory(before, told) if before is not None else None
    sections = [
        _memory(told, before),
        _cells(told),
        failed_cells_section(told),
        devices_section(told),
        _changes_section(told, before),
        _bridges(told),
        _step_memory_section(told, before),
        _balance(told),
        _losses(told),
        _pareto(told, before),
        _times(told, before),
        _communication_section(told),
        _configs(told),
        _method_section(told),
    ]
    return html_page(f"unipar compare: {told.comparison.name}", _head(told, before, apart), sections)


def _head(told: ComparisonPageData, before: ComparisonPageData | None, apart: Sequence[str]) -> str:
    found = told.comparison
    facts = [count_of(found.ranks, "rank")] if found.ranks else []
    facts += [found.precision, f"{count_of(found.samples, 'sample')} a step"]
    facts += [f"{told.parameters:,} parameters"] if told.parameters else []
    sure = found.reference is not None and any(found.agreement(row) is not None for row in found.rows)
    kind, sign = ("bad", "✗") if found.disagreeing_rows else ("good", "✓") if sure else ("open", "?")
    first = found.verdict()
    worries = [*told.problems, *(before.problems if before is not None else ())]
    return "\n".join(
        [
            "<header>",
            f'<p class="kicker">unipar compare · {escape(found.name)} · {escape(" · ".join(facts))}</p>',
            f"<h1>{escape(keep_units_together(comparison_headline(told)))}</h1>",
            *(paragraph(text, "worry") for text in apart),
            *([paragraph(changes.describe_largest_change(before, told), "since")] if before is not None else []),
            *(f'<p class="badge {kind}"><b aria-hidden="true">{sign}</b> {escape(line)}</p>' for line in first[:1]),
            *(
                f'<p class="badge bad"><b aria-hidden="true">{sign}</b> {escape(line)}</p>'
                for line in first[1:]
                if kind == "bad"
            ),
            f'<p class="where">Measured on {escape(describe_machine_and_devices(told))}.</p>',
            *(f'<p class="worry">{escape(worry)}</p>' for worry in worries),
            "</header>",
        ]
    )


def describe_machine_and_devices(told: ComparisonPageData) -> str:
    """The machine, in words."""
    devices = sorted({a.device.upper() if a.on is None else a.on.name for c in told.cells for a in c.memory})
    return describe_machine(
        told.machine, told.versions, [f"memory counted on the {' and '.join(devices)}"] if devices else ()
    )


def _key(told: ComparisonPageData) -> str:
    """The colours, in the order in which they are drawn."""
    items = "".join(f'<li><i class="c-{c}"></i>{escape(CATEGORY_LABELS[c])}</li>' for c in _categories_at_peak(told))
    return f'<ul class="key">{items}</ul>'


def _categories_at_peak(told: ComparisonPageData) -> list[Category]:
    """Those that any cell holds at its peak."""
    held = {
        c for cell in told.measured_cells if cell.fullest_account is not None for c in cell.fullest_account.peak.held
    }
    return [c for c in CATEGORIES if c in held]


def _memory(told: ComparisonPageData, before: ComparisonPageData | None) -> str:
    title = "Memory at the peak"
    if not told.measured_cells:
        return html_section(
            "memory", title, paragraph("Memory was not measured in this comparison: no cell has an account of it.")
        )
    missing = [c.cell for c in told.cells if c.row.outcome == "ran" and c.fullest_account is None]
    shown: list[Category] = [
        c
        for c in CATEGORIES
        if any(c in cell.fullest_account.peak.held for cell in told.measured_cells if cell.fullest_account)
    ]
    rows: list[list[str]] = []
    for cell in told.measured_cells:
        assert cell.fullest_account is not None
        peak = cell.fullest_account.peak
        parts = [format_size(peak.held[c]) if c in peak.held else _NO_VALUE for c in shown]
        rows.append([cell.cell, peak.name, format_size(peak.peak), *parts])
    cut = [
        f"{c.cell} holds {format_size(c.peak)}"
        for c in told.measured_cells
        if c.cell in choose_bar_scale(told, before)[1]
    ]
    table = html_table(
        ["cell", "phase", "peak", *(CATEGORY_LABELS[c] for c in shown)], rows, "Bytes by category at the peak", (0, 1)
    )
    return html_section(
        "memory",
        title,
        paragraph(
            "What the fullest rank had allocated at its fullest moment, beyond what it held before training. "
            + ("The thin bar is the earlier comparison." if before is not None and before.measured_cells else "")
        ),
        _key(told),
        paragraph(
            f"A bar with a gap is cut short, for all others could not be read beside it: {', '.join(cut)}."
            if cut
            else ""
        ),
        html_figure(lambda width: draw_memory_bars(told, before, width), table),
        *(paragraph(library_default_note(told, c), "own") for c in told.cells if c.is_library_default),
        paragraph(f"Not measured: {', '.join(missing)}." if missing else ""),
    )


def _cells(told: ComparisonPageData) -> str:
    head = ["cell", "loss", "median step", "× time", "samples/s"]
    cuda, measured = (
        any(a.on is not None for c in told.measured_cells for a in c.memory),
        not _has_cuda_predictions(told),
    )
    memory = memory_column_heads(cuda=cuda, measured=measured)
    base = told.comparison.baseline
    rows: list[list[str]] = []
    for cell in told.cells:
        row = cell.row
        if row.outcome != "ran" or not row.timed_seconds:
            rows.append([cell.cell, OUTCOME_PREFIXES.get(row.outcome, "") + (row.note or row.outcome)])
            continue
        found = told.comparison.agreement(row)
        verdict = "reference" if row is told.comparison.reference else str(found or _NO_VALUE)
        factor = f"{cell.median_seconds / median(base.timed_seconds):.2f}" if base is not None else _NO_VALUE
        rows.append(
            [
                cell.cell,
                verdict + (" ✗" if found is not None and not found.within else ""),
                format_duration(cell.median_seconds),
                factor,
                f"{told.comparison.samples / cell.median_seconds:.1f}",
                *memory_cells(row, told.comparison.rank_count(row)),
            ]
        )
    return html_section(
        "cells",
        "Every cell",
        html_table([*head, *memory], rows, "What each cell costs, and whether it agrees", (0, 1)),
        column_notes(cuda=cuda, measured=not _has_cuda_predictions(told)),
    )


def _has_cuda_predictions(told: ComparisonPageData) -> bool:
    """Whether any figure of CUDA is a prediction."""
    return any(
        isinstance(total_on_cuda(largest_account(c.memory), told.comparison.rank_count(c.row)), PredictedCudaMemory)
        for c in told.measured_cells
    )


def _changes_section(told: ComparisonPageData, before: ComparisonPageData | None) -> str:
    if before is None:
        return ""
    head = ["cell", "memory before", "now", "change", "step before", "now", "change"]
    differ = changes.differing_key_rows(before.config, told.config)
    known = bool(before.config and told.config)
    return html_section(
        "changed",
        "Before and after",
        *(paragraph(text, "worry") for text in changes.timing_warnings(before, told)),
        html_table(head, changes.change_rows(before, told), f"Since {before.folder}"),
        html_table(["key", "before", "now"], differ, "What the configs say differently", (0, 1, 2)) if differ else "",
        paragraph(
            "Both configs say the same." if known and not differ else "" if known else "One config was not kept."
        ),
    )


def _bridges(told: ComparisonPageData) -> str:
    base = baseline_with_memory(told)
    others = [c for c in cells_to_rank(told.measured_cells, told) if c is not base]
    if base is None or not others:
        return ""

    def one(cell: CellPageData) -> str:
        moved = [
            [CATEGORY_LABELS[c], f"{'−' if d < 0 else '+'}{format_size(abs(d))}"]
            for c, d in category_differences(base, cell).items()
        ]
        table = html_table(["category", "difference"], moved, f"From {base.cell} to {cell.cell}")
        return html_figure(lambda width: draw_bridge(base, cell, width), table)

    first, *rest = others
    return html_section(
        "bridge",
        "Which bytes moved where",
        paragraph(f"From {base.cell} to {first.cell}, the smallest other: each row begins where the last one ended."),
        one(first),
        *(f"<details><summary>From {escape(base.cell)} to {escape(c.cell)}</summary>{one(c)}</details>" for c in rest),
    )


def _step_memory_section(told: ComparisonPageData, before: ComparisonPageData | None) -> str:
    drawn = cells_with_curves(told.measured_cells)
    if not drawn:
        return ""
    rows = [
        [
            c.cell,
            *(
                format_size(p.peak) if (p := next((p for p in a.phases if p.name == n), None)) else _NO_VALUE
                for n in MEMORY_PHASES
            ),
        ]
        for c, a in drawn
    ]
    dashed = " Dashed: the earlier comparison." if before is not None else ""
    return html_section(
        "through",
        "Memory through a step",
        paragraph(
            "Along the time of one step of the fullest rank: phases are as long as in a plain step, allocations "
            f"evenly spread within each. Panels share a scale unless they say so.{dashed}"
        ),
        html_figure(
            lambda width: draw_memory_through_step(told, before, width),
            html_table(["cell", *MEMORY_PHASES], rows, "The fullest moment of each phase"),
        ),
    )


def _balance(told: ComparisonPageData) -> str:
    if not any(len(c.memory) > 1 for c in told.measured_cells):
        return ""
    ranks = sorted({a.rank for c in told.measured_cells for a in c.memory})
    rows = [
        [c.cell, *(next((format_size(a.peak.peak) for a in c.memory if a.rank == r), _NO_VALUE) for r in ranks)]
        for c in told.measured_cells
    ]
    return html_section(
        "balance",
        "Balance between ranks",
        paragraph("A dot a rank; at the right, how much more the fullest holds than the emptiest."),
        html_figure(
            lambda width: draw_rank_balance(told, width),
            html_table(["cell", *(f"rank {r}" for r in ranks)], rows, "Peak by rank"),
        ),
    )


def _losses(told: ComparisonPageData) -> str:
    ran = [c.row for c in told.cells if c.row.outcome == "ran" and c.row.losses]
    if not ran:
        return ""
    head = ["step", *(row.cell for row in ran)]
    rows = [[str(i + 1), *(f"{row.losses[i]:.8g}" for row in ran)] for i in range(len(ran[0].losses))]
    parts = [html_figure(lambda width: draw_losses(told, width), html_table(head, rows, "Loss by step"))]
    if series := loss_differences(told):
        worst = [[n, f"{max(v):.1e}" if max(v) else "same bits", str(v.index(max(v)) + 1)] for n, v in series if v]
        bounds = [
            "same bits",
            f"< {SHADE_BOUNDS[0]:g}",
            *(f"< {b:g}" for b in SHADE_BOUNDS[1:]),
            f"≥ {SHADE_BOUNDS[-1]:g}",
        ]
        key = "".join(f'<li><i class="s{i}"></i>{escape(words)}</li>' for i, words in enumerate(bounds))
        parts += [
            "<h3>How far each is from one process</h3>",
            paragraph(
                "Relative to the loss where that is above 1. Allowed over the first 20 steps in "
                f"{told.comparison.precision}: {loss_tolerance(told.comparison.precision):g}; a cross is beyond that."
            ),
            f'<ul class="key">{key}</ul>',
            html_figure(
                lambda width: draw_loss_differences(told, width),
                html_table(["cell", "largest difference", "at step"], worst, "The largest difference of each cell"),
            ),
        ]
    return html_section(
        "losses",
        "Losses",
        paragraph("One process as a dark line, every cell above it: where they agree, one line is seen."),
        *parts,
    )


def _pareto(told: ComparisonPageData, before: ComparisonPageData | None) -> str:
    cells = [c for c in told.measured_cells if c.timed]
    if not cells:
        return ""
    rows = [[c.cell, format_size(c.peak), f"{told.comparison.samples / c.median_seconds:.1f}"] for c in cells]
    table = html_table(["cell", "memory at the peak", "samples/s"], rows, "Throughput and memory")
    aside = f" {one.cell}, one process, is not ranked." if (one := told.comparison.reference) is not None else ""
    moved = " A line leads from where a cell was before." if before is not None and before.measured_cells else ""
    return html_section(
        "pareto",
        "Throughput against memory",
        paragraph(f"Better is up and to the left. Filled: no other cell beats it in both.{aside}{moved}"),
        html_figure(lambda width: draw_pareto(told, before, width), table),
    )


def _times(told: ComparisonPageData, before: ComparisonPageData | None) -> str:
    if not told.timed_cells:
        return ""
    rows = [
        [
            c.cell,
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
        for c in told.timed_cells
    ]
    head = ["cell", "fastest", "middle half from", "median", "to", "slowest"]
    below = " Below it, the middle half before." if before is not None else ""
    return html_section(
        "times",
        "Time of a step",
        paragraph(f"A dot a step, of the slowest rank; the bar is the middle half, the line the median.{below}"),
        html_figure(lambda width: draw_step_times(told, before, width), html_table(head, rows, "Time of a step")),
    )


def _communication_section(told: ComparisonPageData) -> str:
    kinds = sorted({kind for c in told.measured_cells for a in c.memory for kind in a.sent})
    if not kinds:
        return ""
    known = [(c.cell, a) for c in told.measured_cells if (a := c.fullest_account)]
    rows = [[cell, *(format_size(a.sent[k]) if k in a.sent else _NO_VALUE for k in kinds)] for cell, a in known]
    ways = {a.sent_by: [cell for cell, b in known if b.sent and b.sent_by == a.sent_by] for _, a in known if a.sent_by}
    return html_section(
        "sent",
        "What a step sends",
        html_table(["cell", *kinds], rows, "Payload bytes of one step by collective"),
        paragraph(
            "Of each call the whole tensor that it is about: of what a rank gives and what it gets the larger.", "note"
        ),
        *(paragraph(f"{', '.join(cells)}: by {way}.", "note") for way, cells in ways.items()),
    )


def _configs(told: ComparisonPageData) -> str:
    whose = "what was asked"
    asked = dict(told.config)
    if not asked:
        known = next((c for c in told.cells if c.config), None)
        if known is None:
            return ""
        asked, whose = dict(known.config), known.cell
    rows = [
        [c.cell, key, now]
        for c in told.cells
        if c.config
        for key, _, now in changes.differing_key_rows(asked, c.config)
    ]
    return html_section(
        "configs",
        "Configs",
        html_table(["cell", "key", "is"], rows, f"Where a cell's config differs from {whose}", (0, 1, 2))
        if rows
        else "",
        config_listing(asked, f"All keys of {whose}"),
    )


def _method_section(told: ComparisonPageData) -> str:
    accounts = [(c, a) for c in told.cells if (a := c.fullest_account) is not None]
    methods = sorted({a.method for _, a in accounts})
    keeps = (
        ["before the timed steps malloc is told to keep what is freed"]
        if describe_allocator_settings(a for _, a in accounts)
        else []
    )
    notes = sorted({f"{c.cell}: {note}" for c, a in accounts for note in a.notes})
    saved = [[c.cell, *(format_size(s) for s in a.saved)] for c, a in accounts if a.saved is not None]
    asked = [f"--cell {shlex.quote(c.cell)}" for c in told.cells if c.row is not told.comparison.rows[0]]
    config, out = original_config_path(told.folder, told.comparison.name), told.folder.parent
    places = [shlex.quote(str(config)), f"--out {shlex.quote(str(out))}"]
    command = ["unipar compare", *places, *asked, "--overwrite"]
    return html_section(
        "how",
        "How it was measured",
        bullet_list([*methods, *told.comparison.remarks(), *keeps, *notes]),
        html_table(["cell", "by lifetime", "as autograd saved them"], saved, "Activations at the end of a forward")
        if saved
        else "",
        cuda_assumptions() if _has_cuda_predictions(told) else "",
        environment_tables(told.machine, told.versions),
        repeat_command_block(" ".join(command) if told.config and told.folder.name == "compare" else ""),
    )
