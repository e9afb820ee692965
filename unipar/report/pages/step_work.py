"""Section of a page on what a step of each strategy or world does: throughput, operations, waiting, graph breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.profiling.work import RankWork
from unipar.report.html.elements import bullet_list, columns_table, html_section, html_table, paragraph
from unipar.results.comparison import TurnResults
from unipar.results.step_work.figures import StepFigures
from unipar.results.step_work.work_table import break_reasons, work_columns
from unipar.utils.columns import Column, Row


def step_work_section(results: TurnResults, names: Sequence[Column[Row]], rows: Mapping[str, Row]) -> str:
    """Return the section, or "" if no row has a figure.

    `names`: the first columns of each table; `rows`: a row of theirs by the name of its result.
    """
    figures = {name: one for name, one in results.step_figures().items() if one != StepFigures()}
    columns = work_columns(list(figures.values()))
    if not columns:
        return ""
    remarks = results.work_remarks(reasons=False)
    waits_by = sorted({rank.waits_by for row in results.rows for rank in row.work if rank.waits_by})
    waits = any(column.key == "waits_least" for column in columns)
    sentences = [f"Waiting is {how}, in steps that are not timed." for how in waits_by if waits]
    heads = [column.of(rows.__getitem__) for column in names]
    several = [row for row in results.rows if len(row.work) > 1 and any(rank.waits for rank in row.work)]
    return html_section(
        "work",
        "What a step does",
        columns_table([*heads, *(column.of(figures.get) for column in columns)], list(figures), "Work of a step"),
        bullet_list([*(remark.text for remark in remarks), *sentences]),
        _waits_by_rank(heads, {row.strategy: row.work for row in several}) if several else "",
        _reasons(figures),
    )


def _waits_by_rank(heads: Sequence[Column[str]], work: Mapping[str, Sequence[RankWork]]) -> str:
    ranks = [
        Column[str](
            f"rank {i}",
            lambda name, i=i: work[name][i].waiting if i < len(work[name]) else None,
            lambda share: f"{100 * share:.1f} %",
        )
        for i in range(max(map(len, work.values())))
    ]
    return columns_table([*heads, *ranks], list(work), "Share of a step in which a rank waits")


def _reasons(figures: dict[str, StepFigures]) -> str:
    if all(one.compiled is None for one in figures.values()):
        return ""
    reasons = break_reasons(figures.values())
    if not reasons:
        return paragraph("Every compiled graph is whole, and none was compiled again.")
    rows = [[kind, str(count), why] for kind, count, why in reasons]
    return html_table(["what", "times", "reason"], rows, "Graph breaks and recompiles, by reason", (0, 2))
