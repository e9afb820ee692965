"""Section of a page on what a step of each strategy or world does: throughput, operations, waiting, graph breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.report.html.elements import bullet_list, html_section, html_table, paragraph
from unipar.results.comparison import TurnResults
from unipar.results.step_work.figures import StepFigures
from unipar.results.step_work.work_table import break_reasons, work_columns

_NO_VALUE = "–"


def step_work_section(
    results: TurnResults, heads: Sequence[str], names: Mapping[str, Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """Return the section, or "" if no row has a figure.

    `heads`: those of the first columns of each table; `names`: the texts in these columns, by the name of the row;
    `left`: the columns that are aligned left.
    """
    figures = {row: one for row, one in results.step_figures().items() if one != StepFigures()}
    columns = work_columns(list(figures.values()))
    if not columns:
        return ""
    rows = [[*names[row], *(_dashed(of(one)) for of in columns.values())] for row, one in figures.items()]
    remarks = results.work_remarks(reasons=False)
    waits_by = sorted({rank.waits_by for row in results.rows for rank in row.work if rank.waits_by})
    said = [f"Waiting is {how}, in steps that are not timed." for how in waits_by if "waits" in columns]
    return html_section(
        "work",
        "What a step does",
        html_table([*heads, *columns], rows, "Work of a step", left),
        bullet_list([*(remark.text for remark in remarks), *said]),
        _waits_by_rank(results, heads, names, left),
        _reasons(figures),
    )


def _waits_by_rank(
    results: TurnResults, heads: Sequence[str], names: Mapping[str, Sequence[str]], left: Sequence[int]
) -> str:
    several = [row for row in results.rows if len(row.work) > 1 and any(rank.waits for rank in row.work)]
    if not several:
        return ""
    most = max(len(row.work) for row in several)
    rows = [
        [*names[row.strategy], *(_share(rank.waiting) for rank in row.work), *[_NO_VALUE] * (most - len(row.work))]
        for row in several
    ]
    ranks = [f"rank {i}" for i in range(most)]
    return html_table([*heads, *ranks], rows, "Share of a step in which a rank waits", left)


def _reasons(figures: dict[str, StepFigures]) -> str:
    if all(one.compiled is None for one in figures.values()):
        return ""
    found = break_reasons(figures.values())
    if not found:
        return paragraph("Every compiled graph is whole, and none was compiled again.")
    rows = [[kind, str(count), why] for kind, count, why in found]
    return html_table(["what", "times", "reason"], rows, "Graph breaks and recompiles, by reason", (0, 2))


def _dashed(text: str) -> str:
    return _NO_VALUE if text == "-" else text


def _share(value: float | None) -> str:
    return _NO_VALUE if value is None else f"{100 * value:.1f} %"
