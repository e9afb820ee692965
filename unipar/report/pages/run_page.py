"""report.html of one run: losses, step times, memory, config, versions, and the command that starts it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unipar.memory.account import MemoryAccount
from unipar.report.charts.lines import LineSeries, StepMark, draw_lines
from unipar.report.data import result_changes as changes
from unipar.report.data.attempt_rows import ShownAttempt
from unipar.report.data.pipeline_data import read_pipeline
from unipar.report.data.run_data import RunPageData
from unipar.report.html.elements import (
    NO_VALUE,
    Badge,
    bullet_list,
    columns_table,
    config_differences,
    config_listing,
    describe_machine,
    environment_tables,
    html_figure,
    html_page,
    html_section,
    html_table,
    images_row,
    page_header,
    paragraph,
    repeat_command_block,
)
from unipar.report.pages.experts_section import experts_section
from unipar.report.pages.memory.columns import phase_table
from unipar.report.pages.pipeline_section import pipeline_section
from unipar.results.memory_tables import describe_counting, largest_account
from unipar.results.run_traces import ENTRY_HEADS, HOW_TO_OPEN
from unipar.utils.columns import Column, known_columns
from unipar.utils.text import count_of, format_duration, format_flops, format_size

_IMAGES_SHOWN = 6
"""Images of one name that a page shows."""


StepEvent = Mapping[str, Any]


def render_run(run: RunPageData, before: RunPageData | None = None) -> str:
    """Return the page; with `before`, an earlier run's curves are drawn behind this run's."""
    return html_page(f"unipar run: {run.name}", _head(run, before), run_sections(run, before))


def run_sections(run: RunPageData, before: RunPageData | None = None) -> list[str]:
    """Return the sections of the page; those without figures are empty."""
    return [
        _losses(run, before),
        _changes_section(run, before),
        _evals(run),
        _images(run),
        _times(run, before),
        _traces(run),
        experts_section(run.report.experts),
        pipeline_section([(run.report.strategy, read_pipeline(run.report.strategy, run.config))]),
        _memory(run),
        _config(run),
        _method_section(run),
    ]


def run_headline(run: RunPageData) -> str:
    """Return the first sentence of the page: first and last loss, number of steps, duration."""
    report = run.report
    took = f"{count_of(report.steps, 'step')}; {format_duration(report.seconds)} from the first event to the last"
    if not report.losses:
        return f"{took}; no loss was recorded."
    (first, a), (last, b) = report.losses[0], report.losses[-1]
    return f"The loss is {a:.4f} at step {first} and {b:.4f} at step {last}: {took}."


def _describe_end(run: RunPageData) -> Badge:
    """Return the badge that says how the run ended."""
    if run.report.stopped is not None:
        return Badge("open", f"stopped by {run.report.stopped_by} after step {run.report.stopped}")
    if run.failure:
        return Badge("bad", f"failed: {run.failure}")
    if not run.ended:
        return Badge("bad", "it did not finish, or is still running: this is what was recorded so far")
    return Badge("good", "finished")


def _head(run: RunPageData, before: RunPageData | None) -> str:
    report = run.report
    facts = [run.name, report.strategy, count_of(report.size, "rank"), f"{report.parameters:,} parameters"]
    return page_header(
        ["unipar run", *facts],
        run_headline(run),
        mismatches=changes.describe_mismatches(before, run) if before is not None else [],
        since=f"Before, {before.folder}: {run_headline(before)}" if before is not None else "",
        badges=[_describe_end(run)],
        where=f"Ran on {describe_machine(run.machine, run.versions)}.",
        worries=[*run.problems, *(before.problems if before is not None else ())],
    )


def _loss_series(run: RunPageData, before: RunPageData | None) -> list[LineSeries]:
    old = (
        [LineSeries(f"before, {name}", "curve before", points) for name, points in _losses_by_name(before)]
        if before
        else []
    )
    return old + [LineSeries(name, "curve", points) for name, points in _losses_by_name(run)]


def _losses_by_name(run: RunPageData) -> list[tuple[str, Sequence[tuple[int, float]]]]:
    parts = {f"loss of {name}": points for name, points in run.report.parts.items()}
    return [(name, points) for name, points in (parts or {"loss": run.report.losses}).items() if points]


def _losses(run: RunPageData, before: RunPageData | None) -> str:
    if not run.report.losses:
        return ""
    return html_section(
        "losses",
        "Losses",
        paragraph(_describe_losses(run, before)),
        html_figure(
            lambda width: draw_lines(
                _loss_series(run, before), width, "Loss by step", marks=_marks(run.attempts), ticks=run.saved
            ),
            columns_table(_LOSS_COLUMNS, run.rows, "Loss by step"),
        ),
        _attempts_table(run.attempts),
    )


def _format_rates(lr: float | Sequence[float] | None) -> str:
    """Return the rate of a logged step, or those of the optimizer's groups."""
    rates = lr if isinstance(lr, Sequence) else [lr]
    return ", ".join(NO_VALUE if rate is None else f"{rate:.4g}" for rate in rates)


_LOSS_COLUMNS: Final[Sequence[Column[StepEvent]]] = (
    Column("step", lambda row: row["step"], right=False),
    Column("loss", lambda row: row["loss"], "{:.8g}".format),
    Column("norm of the gradient", lambda row: row.get("norm"), "{:.4g}".format),
    Column("rate", lambda row: row.get("lr"), _format_rates),
)


def _describe_losses(run: RunPageData, before: RunPageData | None) -> str:
    """Return what the figure of the losses shows."""
    sentences = ["Loss of the global batch, at each logged step."]
    if before is not None:
        sentences.append("Dashed: the earlier run.")
    if run.attempts:
        sentences.append(
            f"The run has {len(run.attempts)} attempts: a vertical line is where one went on from a checkpoint, with "
            "the strategy and the ranks that trained from there."
        )
    if run.saved:
        sentences.append("Ticks on the axis: checkpoints.")
    return " ".join(sentences)


def _marks(attempts: Sequence[ShownAttempt]) -> list[StepMark]:
    first, *later = attempts or [None]
    marks = [StepMark(a.after, a.name) for a in later if a is not None and a.after is not None]
    return [StepMark(1, first.name), *marks] if first is not None else marks


def _attempts_table(attempts: Sequence[ShownAttempt]) -> str:
    if not attempts:
        return ""
    rows: list[list[str]] = []
    for a in attempts:
        first = NO_VALUE if a.after is None else str(a.after + 1)
        rows.append([str(a.number), a.strategy, str(a.ranks or NO_VALUE), first, str(a.reached), a.end])
    head = ["attempt", "strategy", "ranks", "from step", "to step", "end"]
    changes = [f"Config of attempt {a.number}: {'; '.join(a.changes)}." for a in attempts if a.changes]
    return html_table(head, rows, "Attempts of this run", text=(0, 1, 5)) + "".join(map(paragraph, changes))


def _changes_section(run: RunPageData, before: RunPageData | None) -> str:
    if before is None:
        return ""
    return html_section(
        "changed",
        "Before and after",
        *(
            paragraph(text, "worry")
            for text in changes.environment_warnings(before.machine, run.machine, before.versions, run.versions)
        ),
        config_differences(before.config, run.config),
    )


def _evals(run: RunPageData) -> str:
    if not run.report.evals:
        return ""
    names = list(dict.fromkeys(name for _, values in run.report.evals for name in values))
    rows = [
        [str(s), *(f"{v[n]:.6g}" if v.get(n) is not None else NO_VALUE for n in names)] for s, v in run.report.evals
    ]
    table = html_table(["step", *names], rows, "Metrics of the validation data")
    return html_section("evals", "Evaluations", table, paragraph(_early_stop(run)))


def _early_stop(run: RunPageData) -> str:
    """Return a sentence on `eval.stop`: its rule, and the evaluations since the best one; "" without the section."""
    metric, patience = run.config.get("eval.stop.metric"), run.config.get("eval.stop.patience")
    if not isinstance(metric, str) or not isinstance(patience, int):
        return ""
    smaller = run.config.get("eval.stop.mode") != "max"
    rule = (
        f"eval.stop: the run ends when {metric} has not become {'smaller' if smaller else 'larger'} in "
        f"{count_of(patience, 'evaluation')}"
    )
    values = [(step, value) for step, row in run.report.evals if (value := row.get(metric)) is not None]
    if not values:
        return f"{rule}; no evaluation gave a finite one."
    best, value = min(values, key=lambda pair: pair[1] if smaller else -pair[1])
    since = sum(step > best for step, _ in run.report.evals)
    return f"{rule}. The best is {value:.6g}, after step {best}; {count_of(since, 'evaluation')} since then."


def _images(run: RunPageData) -> str:
    """Return the images that were logged: of each name some, the first and the last among them."""
    names = list(dict.fromkeys(name for _, files in run.report.images for name in files))
    parts: list[str] = []
    for name in names:
        files = [(step, files[name]) for step, files in run.report.images if name in files]
        shown = files if len(files) <= _IMAGES_SHOWN else _spread(files, _IMAGES_SHOWN)
        parts.append(images_row(name, [(f"step {step}", file) for step, file in shown]))
        if len(shown) < len(files):
            parts.append(paragraph(f"{len(shown)} of {len(files)}; all are in {files[0][1].parent}.", "note"))
    return html_section("images", "Images", *parts) if parts else ""


def _spread(files: Sequence[tuple[int, Path]], count: int) -> list[tuple[int, Path]]:
    """Return this many of the files, evenly from the first to the last."""
    return [files[round(i * (len(files) - 1) / (count - 1))] for i in range(count)]


_TIME_COLUMNS: Final[Sequence[Column[StepEvent]]] = (
    Column("step", lambda row: row["step"], right=False),
    Column("a step", lambda row: row["seconds"], format_duration),
    Column("samples/s", lambda row: row.get("samples_per_second", row["samples"] / row["seconds"]), "{:.1f}".format),
    Column("tokens/s", lambda row: row.get("tokens_per_second"), "{:,.0f}".format, optional=True),
    Column("operations", lambda row: row.get("flops_per_second"), lambda n: f"{format_flops(n)}/s", optional=True),
    Column("MFU", lambda row: row.get("mfu"), "{:.1%}".format, optional=True),
    Column("waits", lambda row: row.get("waiting"), "{:.1%}".format, optional=True),
    Column("graph breaks", lambda row: row.get("graph_breaks"), optional=True),
    Column("recompiles", lambda row: row.get("recompiles"), optional=True),
)


def _times(run: RunPageData, before: RunPageData | None) -> str:
    own = LineSeries("ms a step", "curve", _times_of(run))
    if not own.points:
        return ""
    old = [LineSeries("before, ms a step", "curve before", _times_of(before))] if before and _times_of(before) else []
    timed = [row for row in run.rows if row.get("seconds") and row.get("samples")]
    reasons = [[what, why] for what, why in run.compiler]
    return html_section(
        "times",
        "Time of a step",
        paragraph(
            "Milliseconds a step on rank 0: the mean since the previous row, with all that a run does between steps."
        ),
        html_figure(
            lambda width: draw_lines([*old, own], width, "Milliseconds a step"),
            columns_table(known_columns(_TIME_COLUMNS, run.rows), timed, "Time of a step"),
        ),
        bullet_list(list(run.work)),
        html_table(["what", "reason"], reasons, "Graph breaks and recompiles, each reason once", (0, 1))
        if reasons
        else "",
    )


def _traces(run: RunPageData) -> str:
    """Return the largest entries of the ranks that were traced, and the files; "" if nothing was to be traced."""
    parts = [paragraph(f"No trace: {run.no_trace}.", "note")] if run.no_trace else []
    for trace in run.traces:
        label = f"Largest entries of {trace.title}, own time on the {trace.counted_on}"
        parts.append(html_table(ENTRY_HEADS, trace.rows, label))
        parts.append(paragraph(f"{trace.cost[0].upper()}{trace.cost[1:]}. {trace.file}: {HOW_TO_OPEN}."))
    return html_section("trace", "Trace", *parts) if parts else ""


def _times_of(run: RunPageData) -> list[tuple[int, float]]:
    return [(int(row["step"]), 1e3 * row["seconds"]) for row in run.rows if row.get("seconds")]


def _memory(run: RunPageData) -> str:
    peaks = [[str(rank), NO_VALUE if peak is None else format_size(peak)] for rank, peak in run.peaks.items()]
    logged, ended = run.report.memory[-1:], any(run.peaks.values())
    if not ended and not run.memory and not logged:
        return html_section(
            "memory", "Memory", paragraph("No rank recorded its memory: that happens at the end of a run.")
        )
    parts: list[str] = []
    if ended:
        parts.append(
            html_table(["rank", "peak RSS"], peaks, "Peak resident memory of each rank, as the system counts it")
        )
        parts.append(paragraph("" if all(run.peaks.values()) else f"{NO_VALUE}: the rank recorded no end.", "note"))
    if run.memory:
        parts += _account_parts(largest_account(run.memory))
    for step, phases in () if run.memory else logged:
        parts.append(phase_table(phases, f"Step {step} on the fullest rank, by phase and category"))
        parts.append(paragraph("Counted beyond what was allocated before the model was built."))
    notes = [f"rank {account.rank}: {note}" for account in run.memory for note in account.notes]
    return html_section("memory", "Memory", *parts, bullet_list([*run.watched, *notes]))


def _account_parts(account: MemoryAccount) -> list[str]:
    label = f"Allocated on rank {account.rank}, the fullest, by phase and category"
    how = f"{describe_counting([account])} ({account.method})"
    base = f"Allocated: beyond the {format_size(account.base)} that were allocated before the model was built; {how}."
    return [phase_table(account.phases, label), paragraph(base)]


def _config(run: RunPageData) -> str:
    if not run.config:
        return ""
    return html_section("configs", "Config", config_listing(run.config, "All keys"))


def _method_section(run: RunPageData) -> str:
    return html_section(
        "how",
        "How it ran",
        environment_tables(run.machine, run.versions),
        repeat_command_block(run.command),
        paragraph(
            "" if run.command else "A script started this run by launch() with its own task: run that script again.",
            "note",
        ),
    )
