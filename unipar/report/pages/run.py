"""report.html of one run: losses, step times, memory, config, versions, and the command that starts it again."""

from __future__ import annotations

from collections.abc import Sequence

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, MemoryAccount, PhasePeak
from unipar.report.charts.lines import LineSeries, draw_lines
from unipar.report.data import changes
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.data.run import RunPageData
from unipar.report.pages.elements import (
    bullet_list,
    config_differences,
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
from unipar.results.memory_tables import describe_counting, largest_account
from unipar.utils.text import count_of, format_duration, format_size

_NO_VALUE = "–"


def render_run(ran: RunPageData, before: RunPageData | None = None) -> str:
    """Return the page; with `before`, an earlier run's curves are drawn behind this run's."""
    sections = [
        _losses(ran, before),
        _changes_section(ran, before),
        _evals(ran),
        _times(ran, before),
        _memory(ran),
        _config(ran),
        _method_section(ran),
    ]
    return html_page(f"unipar run: {ran.name}", _head(ran, before), sections)


def run_headline(ran: RunPageData) -> str:
    """Return the first sentence of the page: first and last loss, number of steps, duration."""
    report = ran.report
    took = f"{count_of(report.steps, 'step')}; {format_duration(report.seconds)} from the first event to the last"
    if not report.losses:
        return f"{took}; no loss was recorded."
    (first, a), (last, b) = report.losses[0], report.losses[-1]
    return f"The loss is {a:.4f} at step {first} and {b:.4f} at step {last}: {took}."


def _describe_end(ran: RunPageData) -> tuple[str, str, str]:
    """Return the badge that says how the run ended: CSS class, sign and words."""
    if ran.report.stopped is not None:
        return "open", "?", f"stopped by a signal after step {ran.report.stopped}"
    if ran.failure:
        return "bad", "✗", f"failed: {ran.failure}"
    if not ran.ended:
        return "bad", "✗", "it did not finish, or is still running: this is what was recorded so far"
    return "good", "✓", "finished"


def _head(ran: RunPageData, before: RunPageData | None) -> str:
    report = ran.report
    facts = [ran.name, report.cell, count_of(report.size, "rank"), f"{report.parameters:,} parameters"]
    kind, sign, words = _describe_end(ran)
    since = f"Before, {before.folder}: {run_headline(before)}" if before is not None else ""
    return "\n".join(
        [
            "<header>",
            f'<p class="kicker">unipar run · {escape(" · ".join(facts))}</p>',
            f"<h1>{escape(keep_units_together(run_headline(ran)))}</h1>",
            *(
                paragraph(text, "worry")
                for text in (changes.describe_mismatches(before, ran) if before is not None else [])
            ),
            paragraph(since, "since"),
            f'<p class="badge {kind}"><b aria-hidden="true">{sign}</b> {escape(words)}</p>',
            f'<p class="where">Ran on {escape(describe_machine(ran.machine, ran.versions))}.</p>',
            *(
                paragraph(problem, "worry")
                for problem in [*ran.problems, *(before.problems if before is not None else ())]
            ),
            "</header>",
        ]
    )


def _loss_series(ran: RunPageData, before: RunPageData | None) -> list[LineSeries]:
    old = (
        [LineSeries(f"before, {name}", "curve before", points) for name, points in _losses_by_name(before)]
        if before
        else []
    )
    return old + [LineSeries(name, "curve", points) for name, points in _losses_by_name(ran)]


def _losses_by_name(ran: RunPageData) -> list[tuple[str, Sequence[tuple[int, float]]]]:
    parts = {f"loss of {name}": points for name, points in ran.report.parts.items()}
    return [(name, points) for name, points in (parts or {"loss": ran.report.losses}).items() if points]


def _losses(ran: RunPageData, before: RunPageData | None) -> str:
    if not ran.report.losses:
        return ""
    rows = [
        [
            str(row["step"]),
            f"{row['loss']:.8g}",
            *(_NO_VALUE if row.get(key) is None else f"{row[key]:.4g}" for key in ("norm", "lr")),
        ]
        for row in ran.rows
    ]
    head = ["step", "loss", "norm of the gradient", "rate"]
    return html_section(
        "losses",
        "Losses",
        paragraph("Loss of the global batch, at each logged step." + (" Dashed: the earlier run." if before else "")),
        html_figure(
            lambda width: draw_lines(_loss_series(ran, before), width, "Loss by step"),
            html_table(head, rows, "Loss by step"),
        ),
    )


def _changes_section(ran: RunPageData, before: RunPageData | None) -> str:
    if before is None:
        return ""
    return html_section(
        "changed",
        "Before and after",
        *(
            paragraph(text, "worry")
            for text in changes.environment_warnings(before.machine, ran.machine, before.versions, ran.versions)
        ),
        config_differences(before.config, ran.config),
    )


def _evals(ran: RunPageData) -> str:
    if not ran.report.evals:
        return ""
    names = list(dict.fromkeys(name for _, values in ran.report.evals for name in values))
    rows = [
        [str(s), *(f"{v[n]:.6g}" if v.get(n) is not None else _NO_VALUE for n in names)] for s, v in ran.report.evals
    ]
    return html_section("evals", "Evaluations", html_table(["step", *names], rows, "Metrics of the validation data"))


def _times(ran: RunPageData, before: RunPageData | None) -> str:
    own = LineSeries("ms a step", "curve", _times_of(ran))
    if not own.points:
        return ""
    old = [LineSeries("before, ms a step", "curve before", _times_of(before))] if before and _times_of(before) else []
    rows = [
        [str(row["step"]), format_duration(row["seconds"]), f"{row['samples'] / row['seconds']:.1f}"]
        for row in ran.rows
        if row.get("seconds") and row.get("samples")
    ]
    return html_section(
        "times",
        "Time of a step",
        paragraph(
            "Milliseconds a step on rank 0: the mean since the previous row, with all that a run does between steps."
        ),
        html_figure(
            lambda width: draw_lines([*old, own], width, "Milliseconds a step"),
            html_table(["step", "a step", "samples/s"], rows, "Time of a step"),
        ),
    )


def _times_of(ran: RunPageData) -> list[tuple[int, float]]:
    return [(int(row["step"]), 1e3 * row["seconds"]) for row in ran.rows if row.get("seconds")]


def _memory(ran: RunPageData) -> str:
    peaks = [[str(rank), _NO_VALUE if peak is None else format_size(peak)] for rank, peak in ran.peaks.items()]
    logged, ended = ran.report.memory[-1:], any(ran.peaks.values())
    if not ended and not ran.memory and not logged:
        return html_section(
            "memory", "Memory", paragraph("No rank recorded its memory: that happens at the end of a run.")
        )
    parts: list[str] = []
    if ended:
        parts.append(
            html_table(["rank", "peak RSS"], peaks, "Peak resident memory of each rank, as the system counts it")
        )
        parts.append(paragraph("" if all(ran.peaks.values()) else f"{_NO_VALUE}: the rank recorded no end.", "note"))
    if ran.memory:
        parts += _account_parts(largest_account(ran.memory))
    for step, phases in () if ran.memory else logged:
        parts.append(_phase_table(phases, f"Step {step} on the fullest rank, by phase and category"))
        parts.append(paragraph("Counted beyond what was allocated before the model was built."))
    notes = [f"rank {account.rank}: {note}" for account in ran.memory for note in account.notes]
    return html_section("memory", "Memory", *parts, bullet_list([*ran.watched, *notes]))


def _account_parts(account: MemoryAccount) -> list[str]:
    label = f"Allocated on rank {account.rank}, the fullest, by phase and category"
    how = f"{describe_counting([account])} ({account.method})"
    base = f"Allocated: beyond the {format_size(account.base)} that were allocated before the model was built; {how}."
    return [_phase_table(account.phases, label), paragraph(base)]


def _phase_table(phases: Sequence[PhasePeak], label: str) -> str:
    shown: list[Category] = [c for c in CATEGORIES if any(c in phase.held for phase in phases)]
    rows = [
        [
            phase.name,
            format_size(phase.peak),
            *(format_size(phase.held[c]) if c in phase.held else _NO_VALUE for c in shown),
        ]
        for phase in phases
    ]
    return html_table(["phase", "peak", *(CATEGORY_LABELS[c] for c in shown)], rows, label)


def _config(ran: RunPageData) -> str:
    if not ran.config:
        return ""
    return html_section("configs", "Config", config_listing(ran.config, "All keys"))


def _method_section(ran: RunPageData) -> str:
    return html_section(
        "how",
        "How it ran",
        environment_tables(ran.machine, ran.versions),
        repeat_command_block(ran.command),
        paragraph(
            "" if ran.command else "A script started this run by launch() with its own task: run that script again.",
            "note",
        ),
    )
