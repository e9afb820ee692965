"""report.html of two trainings, one of them observed at least: what changed from the earlier to the later one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unipar.memory.account import MemoryAccount
from unipar.report.charts.lines import LineSeries, StepPanel, draw_lines, draw_step_panels
from unipar.report.charts.step_bars import PeakRow, StepTime, draw_peaks, draw_step_parts, step_part_colours
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.html.elements import (
    Badge,
    bullet_list,
    colour_key,
    columns_table,
    html_figure,
    html_page,
    html_section,
    html_table,
    page_header,
    paragraph,
)
from unipar.report.pages.memory.columns import held_categories
from unipar.report.pages.observation_page import finding_block, phases_table
from unipar.results.training_difference import STEP_COLUMNS, DifferenceRow, TrainingDifference
from unipar.results.training_summary import TrainingSummary
from unipar.utils.columns import known_columns
from unipar.utils.text import count_of


def render_difference(difference: TrainingDifference, own: Sequence[str] = ()) -> str:
    """Return the page; `own`: the later training's own sections, which follow."""
    before, after = difference.before, difference.after
    new = [state for state, _ in difference.findings if state == "new"]
    gone = [state for state, _ in difference.findings if state == "gone"]
    badges = [Badge("bad", f"{count_of(len(new), 'new finding')}")] if new else []
    badges += [Badge("good", f"{count_of(len(gone), 'finding')} gone")] if gone else []
    head = page_header(
        ["unipar report", before.folder.resolve().name, after.folder.resolve().name],
        f"{difference.headline()}.",
        since=f"Before: {before.label}, {before.folder}. After: {after.label}, {after.folder}.",
        badges=badges,
    )
    sections = [
        _findings(difference),
        _setup(difference),
        _times(difference),
        _memory(difference),
        _through_step(difference),
        _sent(difference),
        _losses(difference),
    ]
    if own:
        sections.append(html_section("after", "The later one by itself", paragraph(f"What is in {after.folder}.")))
    name = f"{before.folder.resolve().name} and {after.folder.resolve().name}"
    return html_page(f"unipar report: {name}", head, [*sections, *own])


def _findings(difference: TrainingDifference) -> str:
    if not difference.findings:
        return ""
    blocks = [finding_block(finding, state) for state, finding in difference.findings]
    return html_section("difference-findings", "Findings, before and after", *blocks)


def _rows_table(rows: Iterable[DifferenceRow], label: str) -> str:
    texts = [[row.what, row.before, row.after, row.verdict] for row in rows]
    return html_table(["", "before", "after", ""], texts, label, (0, 3))


def _setup(difference: TrainingDifference) -> str:
    differing = [row for row in difference.setup if row.verdict != "equal"]
    equal = [row for row in difference.setup if row.verdict == "equal"]
    same = _rows_table(equal, "What is equal")
    return html_section(
        "difference-setup",
        "What was trained, before and after",
        bullet_list(f"{row.what}: {row.before} before, {row.after} after." for row in differing),
        "" if differing else paragraph("Everything that both record is equal."),
        f"<details><summary>{count_of(len(equal), 'equal value')}</summary>{same}</details>" if equal else "",
    )


def _times(difference: TrainingDifference) -> str:
    if not difference.times:
        return ""
    both = [("before", difference.before), ("after", difference.after)]
    drawn = [StepTime(name, t.seconds, t.parts) for name, t in both if t.seconds and t.parts]
    table = _rows_table(difference.times, "Time of a step, on the slowest rank")
    if len(drawn) < 2:
        return html_section("difference-times", "Time of a step, before and after", table)
    return html_section(
        "difference-times",
        "Time of a step, before and after",
        paragraph("On the slowest rank. Times of different machines, or of a busy one, cannot be compared."),
        colour_key(step_part_colours(drawn)),
        html_figure(lambda width: draw_step_parts(drawn, width), table),
    )


def _memory(difference: TrainingDifference) -> str:
    if not difference.phases:
        return ""
    rows = [PeakRow(name, now, was) for name, was, now in difference.phases if now is not None]
    shown = held_categories(peak.held for row in rows for peak in (row.peak, row.before) if peak is not None)
    head = ["phase", "", "before", "after", "change"]
    texts = [
        [phase, "peak" if row.what == "peak" else _category_label(row.what), row.before, row.after, row.verdict]
        for phase, row in difference.categories
    ]
    return html_section(
        "difference-memory",
        "Memory, before and after",
        paragraph("Peak of each phase on the fullest rank. The thin bar is the earlier training."),
        colour_key((f"c-{c}", CATEGORY_LABELS[c]) for c in shown),
        html_figure(
            lambda width: draw_peaks(rows, width),
            html_table(head, texts, "Bytes by phase and category, before and after", (0, 1)),
        ),
    )


def _category_label(name: str) -> str:
    return next((label for category, label in CATEGORY_LABELS.items() if category == name), name)


def _through_step(difference: TrainingDifference) -> str:
    was, now = _curve_of(difference.before), _curve_of(difference.after)
    if was is None or now is None:
        return ""
    panel = StepPanel("after", now, was)
    return html_section(
        "difference-through",
        "Memory through a step, before and after",
        paragraph(
            "Memory of the fullest rank during one step. Dashed: the earlier training, its step as long as this."
        ),
        html_figure(
            lambda width: draw_step_panels([panel], width, across=1, high=180),
            f"{phases_table(was, 'Before')}{phases_table(now, 'After')}",
        ),
    )


def _curve_of(training: TrainingSummary) -> MemoryAccount | None:
    return training.account if training.account is not None and training.account.curve else None


def _sent(difference: TrainingDifference) -> str:
    if not difference.sent:
        return ""
    return html_section(
        "difference-sent",
        "What a step sends, before and after",
        _rows_table(difference.sent, "Bytes sent in one step by collective and group, on the fullest rank"),
    )


def _losses(difference: TrainingDifference) -> str:
    if not difference.steps and not difference.agreements:
        return ""
    before, after = difference.before, difference.after
    table = columns_table(
        known_columns(STEP_COLUMNS, difference.steps), difference.steps, "Losses and norms of the first steps"
    )
    return html_section(
        "difference-losses",
        "Losses, before and after",
        bullet_list(f"{text[:1].upper()}{text[1:]}." for text in (*difference.agreements, *difference.loss_notes)),
        *_curves("Loss by step", before.losses, after.losses, table),
        *_curves("Norm of the gradient before the clip", before.norms, after.norms, table),
        *(
            _curves("Learning rate", _first_rates(before), _first_rates(after), table)
            if len({*_first_rates(before).values(), *_first_rates(after).values()}) > 1
            else []
        ),
    )


def _curves(label: str, was: Mapping[int, float], now: Mapping[int, float], table: str) -> list[str]:
    if not was or not now:
        return []
    series = [
        LineSeries("after", "curve", sorted(now.items())),
        LineSeries("before", "curve before", sorted(was.items())),
    ]
    figure = html_figure(lambda width: draw_lines(series, width, label), table)
    return [f"<h3>{label}</h3>", paragraph("Dashed: the earlier training."), figure]


def _first_rates(training: TrainingSummary) -> dict[int, float]:
    return {step: rates[0] for step, rates in training.rates.items()}
