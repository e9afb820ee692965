"""report.html of an observed command: findings, time, losses, memory, bytes sent, the script, and how it ran."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from unipar.memory.account import MemoryAccount
from unipar.report.charts.lines import LineSeries, StepPanel, draw_lines, draw_step_panels
from unipar.report.charts.step_bars import PeakRow, StepTime, draw_peaks, draw_step_parts, step_part_colours
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.data.observation_data import ObservationPageData
from unipar.report.html.elements import (
    NO_VALUE,
    Badge,
    bullet_list,
    colour_key,
    columns_table,
    escape,
    html_figure,
    html_page,
    html_section,
    html_table,
    page_header,
    paragraph,
    repeat_command_block,
)
from unipar.report.pages.devices import accounts_section
from unipar.report.pages.memory.columns import category_rows_table, held_categories
from unipar.results.memory_tables import describe_counting
from unipar.results.observation import Observation, TrainingFinding
from unipar.results.observation_table import (
    RANK_COLUMNS,
    describe_dtypes,
    describe_not_finite,
    describe_steps,
    describe_times,
    describe_work,
    sent_rows,
    shown_ranks,
)
from unipar.results.observed_rank import ObservedRank
from unipar.utils.columns import Column, known_columns
from unipar.utils.text import count_of, cut_middle, first_few, format_duration, format_size

_DRAWN_RANKS: Final = 16
"""Ranks that a figure shows; the table has all."""

_TABLE_RANKS: Final = 6
"""Ranks that a table of memory shows beside each other."""

_BLOCKS: Final = 12
"""Blocks of memory that a page shows."""


def render_observation(page: ObservationPageData) -> str:
    """Return the page."""
    return html_page(f"unipar observe: {page.name}", _head(page), observation_sections(page))


def observation_sections(page: ObservationPageData) -> list[str]:
    """Return the sections of the page; those without figures are empty."""
    seen = page.observation
    return [
        findings_section(seen.command.findings, seen.command.checked, seen.notes),
        _times(page),
        _losses(page),
        _memory(seen),
        _through_step(seen),
        accounts_section("rank", [] if seen.fullest_account is None else [_named(seen.fullest_account)]),
        _sent(seen),
        _script(seen),
        _method(seen),
    ]


def observation_headline(seen: Observation) -> str:
    """Return the first sentence of the page: what was observed, for how long, and whether a fault was found."""
    first = seen.ranks[0]
    model = "; ".join(cut_middle(model.partition(" (")[0], 60) for model in first.models) or "A script"
    seconds = [rank.seconds for rank in seen.ranks if rank.seconds is not None]
    each = f", {format_duration(max(seconds))} a step" if seconds else ""
    found = f"{seen.command.count_findings()}{'' if seen.command.findings else ' was found'}"
    return f"{model} trained for {count_of(first.steps, 'step')} on {count_of(first.size, 'rank')}{each}: {found}."


def _head(page: ObservationPageData) -> str:
    seen, first = page.observation, page.observation.ranks[0]
    facts = [page.name, *first.libraries, count_of(first.size, "rank"), f"{first.parameters:,} parameters"]
    code = seen.command.exit_code
    severities = {finding.severity for finding in seen.command.findings}
    found = Badge("bad" if "fault" in severities else "open" if severities else "good", seen.command.count_findings())
    hosts = ", ".join(dict.fromkeys(rank.host for rank in seen.ranks if rank.host))
    devices = " and ".join(dict.fromkeys(rank.device.upper() for rank in seen.ranks))
    return page_header(
        ["unipar observe", *facts],
        observation_headline(seen),
        badges=[found, Badge("bad" if code else "good", seen.command.describe_end())],
        where=f"Observed on {hosts or 'a machine that was not recorded'}, on the {devices}.",
        worries=dict.fromkeys([*seen.problems, *page.run.problems]),
    )


# Findings


def findings_section(findings: Sequence[TrainingFinding], checked: Sequence[str], notes: Sequence[str]) -> str:
    """Return the section on what the guard found, what it compared, and what could not be observed."""
    return html_section(
        "findings",
        "Findings",
        *(finding_block(finding) for finding in findings),
        "" if findings else paragraph("No fault was found."),
        paragraph(f"Compared without a finding: {', '.join(checked)}." if checked else ""),
        *(["<h3>Not observed</h3>", bullet_list(notes)] if notes else []),
    )


def finding_block(finding: TrainingFinding, state: str = "") -> str:
    """Return a finding: its kind, the sentence, where it was seen, and the way out; `state`: new, or gone."""
    ranks = f"rank{'s' if len(finding.ranks) > 1 else ''} {', '.join(map(str, finding.ranks))}"
    where = [
        f"step {finding.step}" if finding.step else "",
        ranks if finding.ranks else "all ranks",
        finding.parameter,
    ]
    title = f"{finding.severity.capitalize()}: {finding.kind}{f', {state}' if state else ''}"
    says = f"{finding.says[:1].upper()}{finding.says[1:]}."
    return "\n".join(
        [
            f'<h3 class="{"bad" if finding.severity == "fault" else "open"}">{escape(title)}</h3>',
            paragraph(says),
            paragraph(f"Way out: {finding.way_out}." if finding.way_out else ""),
            paragraph(" · ".join(filter(None, where)), "note"),
        ]
    )


# Time


def _times(page: ObservationPageData) -> str:
    ranks = page.observation.ranks
    timed = [rank for rank in ranks if rank.seconds is not None]
    if not timed:
        why = "No step was timed: the script ended before there was one without recording."
        return html_section("times", "Time of a step", paragraph(why))
    drawn = [step_time(f"rank {rank.rank}", rank) for rank in shown_ranks(timed, _DRAWN_RANKS)]
    left = len(timed) - len(drawn)
    series = LineSeries("ms a step", "curve", [(row["step"], 1e3 * row["seconds"]) for row in _timed_rows(page)])
    table = columns_table(_STEP_TIME_COLUMNS, _timed_rows(page), "Time of a step")
    through = html_figure(lambda width: draw_lines([series], width, "Milliseconds a step"), table)
    explained = describe_times(ranks)
    return html_section(
        "times",
        "Time of a step",
        paragraph(f"{explained[:1].upper()}{explained[1:]}."),
        *(paragraph(f"{sentence[:1].upper()}{sentence[1:]}.") for sentence in describe_work(ranks)),
        colour_key(step_part_colours(drawn)),
        html_figure(
            lambda width: draw_step_parts(drawn, width),
            columns_table(known_columns(RANK_COLUMNS, ranks), ranks, "Time of a step and its parts by rank"),
        ),
        paragraph(
            f"Drawn: rank {ranks[0].rank} and the slowest; {left} more are in the table." if left else "", "note"
        ),
        *(
            [
                "<h3>By step</h3>",
                paragraph("Milliseconds a step, the mean since the step before in the table."),
                through,
            ]
            if len(series.points) > 1
            else []
        ),
    )


def step_time(name: str, rank: ObservedRank) -> StepTime:
    """Return the time of a rank's step, as figures show it."""
    return StepTime(name, rank.seconds or 0.0, rank.phases)


def _timed_rows(page: ObservationPageData) -> list[Mapping[str, Any]]:
    return [row for row in page.run.rows if row.get("seconds")]


_STEP_TIME_COLUMNS: Final[Sequence[Column[Mapping[str, Any]]]] = (
    Column("step", lambda row: row["step"], right=False),
    Column("a step", lambda row: row["seconds"], format_duration),
    Column("waits", lambda row: row.get("waiting"), "{:.1%}".format),
)


# Losses, norms, rates


def _losses(page: ObservationPageData) -> str:
    first, losses = page.observation.ranks[0], page.run.report.losses
    steps = sorted({*(int(row["step"]) for row in page.run.rows), *first.norms_after})
    if not steps:
        return ""
    table = columns_table(known_columns(_step_columns(page), steps), steps, "Loss, norms and rate by step")
    norms = [
        LineSeries("before the clip", "curve before", sorted(first.norms.items())),
        LineSeries("as the optimizer had it", "curve", sorted(first.norms_after.items())),
    ]
    rates = sorted({rate for of_step in first.rates.values() for rate in of_step})
    series = [
        LineSeries(f"group {i}", "curve", [(step, of[i]) for step, of in sorted(first.rates.items()) if i < len(of)])
        for i in range(max(map(len, first.rates.values()), default=0))
    ]
    return html_section(
        "losses",
        "Losses",
        paragraph(f"Loss of rank {first.rank}, as it was given to backward, or as --loss names it."),
        paragraph(describe_not_finite(first).capitalize(), "worry"),
        html_figure(
            lambda width: draw_lines([LineSeries("loss", "curve", losses)], width, "Loss by step"),
            table,
        )
        if losses
        else table,
        *(
            [
                "<h3>Norm of the gradient</h3>",
                paragraph(_describe_norms(first)),
                html_figure(lambda width: draw_lines(norms, width, "Norm of the gradient by step"), table),
            ]
            if first.norms or first.norms_after
            else []
        ),
        *(["<h3>Learning rate</h3>"] if rates else []),
        paragraph(f"{', '.join(f'{rate:.4g}' for rate in rates)} in all logged steps.")
        if 0 < len(rates) == len(set(next(iter(first.rates.values()))))
        else html_figure(lambda width: draw_lines(series, width, "Learning rate by step"), table)
        if rates
        else "",
    )


def _describe_norms(rank: ObservedRank) -> str:
    parts = ["Line: of the gradients that the optimizer was given, at the steps that are checked."]
    if rank.norms:
        limit = f", which is at {rank.clip:g}" if rank.clip is not None else ""
        parts.insert(0, f"Dashed: before the script's clip{limit}.")
    if rank.split:
        parts.append("Ranks hold different parts of the gradients: of this rank's part.")
    return " ".join(parts)


def _step_columns(page: ObservationPageData) -> list[Column[int]]:
    first = page.observation.ranks[0]
    losses = dict(page.run.report.losses)
    return [
        Column("step", lambda step: step, right=False),
        Column("loss", losses.get, "{:.8g}".format, optional=True),
        Column("norm before the clip", first.norms.get, "{:.5g}".format, optional=True),
        Column("norm in the optimizer", first.norms_after.get, "{:.5g}".format, optional=True),
        Column("rate", first.rates.get, lambda rates: ", ".join(f"{r:.4g}" for r in dict.fromkeys(rates))),
        Column(
            "backwards",
            lambda step: first.backwards[step - 1] if 0 < step <= len(first.backwards) else None,
            optional=True,
        ),
    ]


# Memory


def _memory(seen: Observation) -> str:
    account = seen.fullest_account
    title = "Memory at the peak of each phase"
    if account is None:
        return html_section(
            "memory", title, paragraph("Memory was not recorded; the notes above say why if it is known.")
        )
    shown = held_categories(phase.held for phase in account.phases)
    peaks = [PeakRow(phase.name, phase) for phase in account.phases]
    lost = account.peak.held.get("unattributed", 0)
    return html_section(
        "memory",
        title,
        paragraph(
            f"Rank {account.rank}, the fullest, in the {account.peak.name}: {format_size(account.peak.peak)}, beyond "
            f"{format_size(account.base)} allocated before the first model; {describe_counting([account])}. "
            f"Unattributed, in no category that was found: {format_size(lost)}, {account.peak.unattributed:.1%} of it."
        ),
        colour_key((f"c-{c}", CATEGORY_LABELS[c]) for c in shown),
        html_figure(
            lambda width: draw_peaks(peaks, width),
            phases_table(account),
        ),
        _ranks_memory(seen.accounts),
        _largest_blocks(account),
        bullet_list(list(account.notes)),
    )


def phases_table(account: MemoryAccount, label: str = "Allocated") -> str:
    """Return a table of an account's phases and categories."""
    peaks = [(phase.name, phase) for phase in account.phases]
    return category_rows_table(peaks, f"{label} on rank {account.rank} at the peak of each phase")


def _ranks_memory(accounts: Sequence[MemoryAccount]) -> str:
    """Return a table of the ranks' peaks: of all, or of those that hold the most and the least."""
    if len(accounts) < 2:
        return ""
    by_size = sorted(accounts, key=lambda account: -account.peak.peak)
    shown = by_size if len(by_size) <= _TABLE_RANKS else [*by_size[: _TABLE_RANKS - 1], by_size[-1]]
    peaks = [(f"rank {a.rank}, {a.peak.name}", a.peak) for a in sorted(shown, key=lambda account: account.rank)]
    which = "each rank" if len(shown) == len(accounts) else f"the fullest ranks of {len(accounts)}, and the emptiest"
    return category_rows_table(peaks, f"Peak of {which}")


def _named(account: MemoryAccount) -> tuple[str, MemoryAccount]:
    return str(account.rank), account


def _largest_blocks(account: MemoryAccount) -> str:
    rows = [
        [CATEGORY_LABELS[block.category], cut_middle(block.name, 60) or NO_VALUE, format_size(block.size)]
        for block in account.peak.largest[:_BLOCKS]
    ]
    if not rows:
        return ""
    table = html_table(["category", "name or place", "bytes"], rows, "The largest blocks at the peak", (0, 1))
    return f"<details><summary>The largest blocks at the peak</summary>{table}</details>"


def _through_step(seen: Observation) -> str:
    account = seen.fullest_account
    if account is None or not account.curve:
        return ""
    panel = StepPanel(f"rank {account.rank}", account)
    return html_section(
        "through",
        "Memory through a step",
        paragraph(
            "Memory of the fullest rank during one step: phases are as long as in a step without recording, "
            "allocations are spread evenly within each."
        ),
        html_figure(
            lambda width: draw_step_panels([panel], width, across=1, high=180),
            phases_table(account),
        ),
    )


# Bytes sent


def _sent(seen: Observation) -> str:
    if not any(account.sent_by for account in seen.accounts):
        return ""
    ranks_of: dict[tuple[tuple[str, str, int], ...], list[int]] = {}
    for account in seen.accounts:
        ranks_of.setdefault(tuple(sent_rows(account)), []).append(account.rank)
    rows = [
        ["all" if len(ranks_of) == 1 else first_few([str(rank) for rank in ranks]), group, kind, format_size(size)]
        for sent, ranks in ranks_of.items()
        for group, kind, size in sent
    ]
    across = max(account.sent_across for account in seen.accounts)
    return html_section(
        "sent",
        "What a step sends",
        html_table(["ranks", "group", "collective", "bytes"], rows, "Bytes sent in one step", (0, 1, 2))
        if rows
        else paragraph("Nothing through torch.distributed."),
        paragraph(
            "Each call counts with its whole tensor: the larger of what a rank gives and what it gets; a tensor that "
            "goes from one rank to another counts where it is sent."
            + (f" In calls whose ranks are on several machines: {format_size(across)}." if across else ""),
            "note",
        ),
        *(paragraph(f"By {way}.", "note") for way in dict.fromkeys(a.sent_by for a in seen.accounts if a.sent_by)),
    )


# The script, and how it ran


def _script(seen: Observation) -> str:
    first = seen.ranks[0]
    batches = f", the first dimension of a batch is {first.first_dimension}" if first.first_dimension else ""
    settings = [[name, f"{value:.6g}"] for name, value in first.settings.items()]
    return html_section(
        "script",
        "The script",
        bullet_list(
            [
                f"Model: {'; '.join(first.models) or 'none that is still alive'}.",
                f"Parameters: {first.parameters:,}{describe_dtypes(first)}.",
                f"Optimizer: {', '.join(first.optimizers)}, called by "
                f"{' in '.join(reversed(first.libraries)) if first.libraries else 'the script itself'}.",
                f"Steps: {describe_steps(first)}{batches}.",
                f"Clip: {'none that was seen' if first.clip is None else f'{first.clip:g}'}.",
            ]
        ),
        html_table(["setting", "value"], settings, "Settings of the optimizer's first group") if settings else "",
        columns_table(known_columns(_PROCESS_COLUMNS, seen.ranks), seen.ranks, "Processes"),
    )


_PROCESS_COLUMNS: Final[Sequence[Column[ObservedRank]]] = (
    Column("rank", lambda rank: rank.rank, right=False),
    Column("host", lambda rank: rank.host or None, right=False),
    Column("process", lambda rank: rank.pid or None),
    Column("device", lambda rank: rank.device, right=False),
    Column("ranks in its group", lambda rank: rank.size),
    Column("launched", lambda rank: rank.launched_size),
    Column("steps", lambda rank: rank.steps),
    Column("skipped", lambda rank: rank.skipped or None, optional=True),
)


def _method(seen: Observation) -> str:
    methods = list(dict.fromkeys(f"Memory: {account.method}." for account in seen.accounts))
    command = shlex.join(["unipar", "observe", "--", *seen.command.command])
    return html_section(
        "how",
        "How it ran",
        paragraph(f"The command {seen.command.describe_end()}."),
        bullet_list(methods),
        repeat_command_block(command),
    )
