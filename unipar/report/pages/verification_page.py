"""report.html of a verification: the verdict, every strategy, faults, differences from one process, config, machine."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from unipar.report.charts.svg import line_class
from unipar.report.charts.verification_chart import draw_step_shares, draw_verdict_shares, draw_verified_losses
from unipar.report.data.verification_data import StepQuantity, VerificationPageData
from unipar.report.html.elements import (
    NO_VALUE,
    Badge,
    bullet_list,
    colour_key,
    columns_table,
    config_listing,
    describe_machine,
    environment_tables,
    escape,
    html_figure,
    html_page,
    html_section,
    html_table,
    page_header,
    paragraph,
    repeat_command_block,
)
from unipar.results.result_files import original_config_path
from unipar.results.row import OUTCOME_PREFIXES
from unipar.results.verdicts import Verdict, describe_verdict, format_share
from unipar.utils.columns import Column, Reason, choose_columns
from unipar.utils.text import count_of, first_few

_PARTS = (
    " Runs that add up matrix products, or sequences, in parts stand for ranks that split these, and widen what is "
    "allowed for strategies with such ranks only."
)
"""Explanation of the runs that only strategies with axes need."""

_STEPS_IN_A_TABLE = 10
_QUANTITY_TITLES: dict[StepQuantity, str] = {"loss": "Losses", "norm": "Norms of the gradient"}


def render_verification(page: VerificationPageData) -> str:
    """Return the page of a verification."""
    now = page.verdicts
    sections = [
        _strategies(page),
        _faults(page),
        _largest_differences(page),
        _differences_by_step(page),
        _losses(page),
        _one_process(page),
        html_section("configs", "Config", config_listing(page.config, "All keys")) if page.config else "",
        _method_section(page),
    ]
    return html_page(f"unipar verify: {now.name}", _head(page), sections)


def _head(page: VerificationPageData) -> str:
    now = page.verdicts
    facts = [now.name, count_of(now.ranks, "rank"), now.precision, count_of(now.steps, "step")]
    where = f"Verified on {describe_machine(now.machine, now.versions)}." if now.machine or now.versions else ""
    return page_header(
        ["unipar verify", *facts],
        f"{now.summary[:1].upper()}{now.summary[1:]}.",
        badges=_badges(page),
        where=where,
        worries=[*(line.strip() for line in now.cut_lines()), *page.problems],
    )


def _badges(page: VerificationPageData) -> list[Badge]:
    """Return which strategies equal a replay bit for bit, and which disagree or failed."""
    now = page.verdicts
    bad = [row for row in now.rows if row.outcome in ("disagrees", "failed")]
    return [
        *(Badge("good", line) for line in now.bitwise_lines()),
        *(Badge("bad", f"{row.strategy}: {_verdict_of(row)}") for row in bad),
    ]


def _verdict_of(row: Verdict) -> str:
    """Return the verdict on a strategy that ran, or why there is none, in its first line."""
    if row.outcome == "agrees":
        return f"agrees, {row.reservation}" if row.undecided else "agrees"
    if row.outcome != "disagrees":
        return OUTCOME_PREFIXES.get(row.outcome, "") + (row.note or "was not run").partition("\n")[0]
    return f"disagrees: {row.finding.kind if row.finding and row.finding.kind else 'unknown kind of fault'}"


def _strategies(page: VerificationPageData) -> str:
    now = page.verdicts
    strategy, loss, *columns = choose_columns(now.columns(), "strategy", "agreement", "share", "bits")
    verdict = Column[Verdict]("verdict", _verdict_of, right=False)
    return html_section(
        "strategies",
        "Every strategy",
        columns_table(
            [strategy, verdict, replace(loss, right=True), *columns],
            now.rows,
            "Whether each strategy gives the numbers of one process",
            reason=lambda row: (
                None if row.outcome in ("agrees", "disagrees") else Reason(row.outcome, _verdict_of(row))
            ),
        ),
        bullet_list(now.column_notes()),
        paragraph(
            "bit for bit: the order of a replay in one process that gives the same bits in every weight and moment, "
            f"with the optimizer as a for-loop and the norm in fp64; {NO_VALUE}: it adds in an order of its own",
            "note",
        ),
    )


def _faults(page: VerificationPageData) -> str:
    parts = list(_fault_parts(page.verdicts.rows))
    return html_section("faults", "What is wrong", *parts) if parts else ""


def _fault_parts(rows: Sequence[Verdict]) -> Iterator[str]:
    for row in rows:
        if row.outcome == "disagrees":
            first, *rest = describe_verdict(row)
            yield f"<h3>{escape(row.strategy)}</h3>"
            yield paragraph(first.partition(": ")[2])
            yield bullet_list(line.strip() for line in rest)
        elif row.outcome == "failed":
            yield f"<h3>{escape(row.strategy)}</h3>\n<pre>{escape(row.note)}</pre>"


def _largest_differences(page: VerificationPageData) -> str:
    strategies = page.judged_strategies
    if not strategies:
        return ""
    known = page.quantities
    rows = [
        [
            row.strategy,
            format_share(row.share),
            *(format_share(row.shares[what]) if what in row.shares else NO_VALUE for what in known),
        ]
        for row in strategies
    ]
    table = html_table(
        ["strategy", "largest", *known], rows, "Largest difference by quantity, divided by the allowed one"
    )
    where = html_table(
        ["strategy", "quantity, step, difference"],
        [[row.strategy, row.worst] for row in strategies],
        "Where it is",
        (0, 1),
    )
    return html_section(
        "largest",
        "Largest difference",
        paragraph(
            "The largest difference from one process over all steps and tensors, divided by the allowed difference. "
            "Beyond 1 the strategy disagrees."
        ),
        html_figure(lambda width: draw_verdict_shares(page, width), f"{table}\n{where}"),
    )


def _differences_by_step(page: VerificationPageData) -> str:
    shown: list[StepQuantity] = [quantity for quantity in ("loss", "norm") if page.step_shares(quantity)]
    if not shown:
        return ""
    parts: list[str] = []
    for quantity in shown:
        groups = page.step_shares(quantity)
        parts += [
            f"<h3>{_QUANTITY_TITLES[quantity]}</h3>",
            colour_key((line_class(i), first_few([r.strategy for r in rows])) for i, (rows, _) in enumerate(groups)),
            html_figure(
                lambda width, quantity=quantity: draw_step_shares(page, quantity, width),
                _difference_tables(page, quantity),
            ),
        ]
    return html_section(
        "steps",
        "Differences by step",
        paragraph(
            "Difference from one process, divided by the allowed one of that step; strategies whose differences are "
            "the same share a line. At the bottom: the very same number."
        ),
        *parts,
    )


def _difference_tables(page: VerificationPageData, quantity: StepQuantity) -> str:
    """Return the differences of each strategy by step, in tables of this many steps that they fit on paper."""
    named = [("allowed", page.verdicts.allowed.get(quantity, []))]
    named += [(row.strategy, values) for row, values in page.differences(quantity)]
    return _step_tables(named, _format_difference, f"Difference of each {quantity} by step")


def _step_tables(named: Sequence[tuple[str, Sequence[float]]], format_value: Callable[[float], str], label: str) -> str:
    """Return tables of values by step, each of this many steps that it fits on paper."""
    count = max(len(values) for _, values in named)
    parts = [range(first, min(first + _STEPS_IN_A_TABLE, count)) for first in range(0, count, _STEPS_IN_A_TABLE)]
    return "\n".join(
        html_table(
            ["", *(str(i + 1) for i in steps)],
            [[name, *(format_value(values[i]) for i in steps if i < len(values))] for name, values in named],
            label,
        )
        for steps in parts
    )


def _format_difference(value: float) -> str:
    return "same" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "not a number"


def _losses(page: VerificationPageData) -> str:
    named = [("one process", page.verdicts.base_run.get("loss", []))]
    named += [(row.strategy, row.losses) for row in page.judged_strategies if row.losses]
    if not named[0][1]:
        return ""
    return html_section(
        "losses",
        "Losses",
        paragraph(
            "The dark line is one process, every strategy is drawn over it: where they agree, only one line is visible."
        ),
        html_figure(
            lambda width: draw_verified_losses(page, width), _step_tables(named, "{:.6g}".format, "Loss by step")
        ),
    )


def _one_process(page: VerificationPageData) -> str:
    """Return the section on the runs of one process, whose differences are what is allowed."""
    now, base = page.verdicts, page.verdicts.base_run
    if not base:
        return ""
    rows: list[list[str]] = []
    for name, run in now.one.items():
        of_loss, of_norm = (
            max((abs(a - b) for a, b in zip(run.get(what, []), base.get(what, []), strict=False)), default=math.nan)
            for what in ("loss", "norm")
        )
        texts = ["the reference"] if run is base else [_format_difference(of_loss), _format_difference(of_norm)]
        rows.append([name, *texts])
    return html_section(
        "one",
        "One process",
        paragraph(
            "Runs of one process that add in other orders. How far they are from one another is what rounding does on "
            "this task; a strategy may differ by four times that."
            + (_PARTS if any(" in " in name and " parts" in name for name in now.one) else "")
        ),
        html_table(["run", "loss", "norm of the gradient"], rows, "Largest difference from the reference", (0,)),
    )


def _method_section(page: VerificationPageData) -> str:
    now = page.verdicts
    config, out = original_config_path(page.folder, now.name), page.folder.parent
    asked = [word for row in now.rows for word in ("--strategy", row.strategy)]
    words = ["unipar", "verify", str(config), "--out", str(out), "--world", str(now.ranks), "--steps", str(now.steps)]
    command = shlex.join([*words, *asked, *(["--strict"] if now.strict else []), "--overwrite"])
    parts = [
        bullet_list(now.remarks),
        environment_tables(now.machine, now.versions) if now.machine or now.versions else "",
        repeat_command_block(command if page.config and page.folder.name == "verify" else ""),
    ]
    return html_section("how", "How it was verified", *parts) if any(parts) else ""
