"""Section of a comparison's page on what a step of each cell does: throughput, operations, waiting, graph breaks."""

from __future__ import annotations

from unipar.report.data.comparison import ComparisonPageData
from unipar.report.html.elements import bullet_list, html_section, html_table, paragraph
from unipar.results.step_work.figures import StepFigures
from unipar.results.step_work.table import break_reasons, describe_work_columns, work_columns

_NO_VALUE = "–"


def step_work_section(page: ComparisonPageData) -> str:
    """Return the section, or "" if no cell has a figure."""
    comparison = page.comparison
    figures = {cell: one for cell, one in comparison.step_figures().items() if one != StepFigures()}
    columns = work_columns(list(figures.values()))
    if not columns:
        return ""
    rows = [[cell, *(_dashed(of(one)) for of in columns.values())] for cell, one in figures.items()]
    remarks = describe_work_columns(comparison.cell_work, figures, comparison.peak_description, reasons=False)
    waits_by = sorted({rank.waits_by for _, work in comparison.cell_work for rank in work if rank.waits_by})
    said = [f"Waiting is {how}, in steps that are not timed." for how in waits_by if "waits" in columns]
    return html_section(
        "work",
        "What a step does",
        html_table(["cell", *columns], rows, "Work of a step"),
        bullet_list([*(remark.text for remark in remarks), *said]),
        _waits_by_rank(page),
        _reasons(figures),
    )


def _waits_by_rank(page: ComparisonPageData) -> str:
    work = [(cell, ranks) for cell, ranks in page.comparison.cell_work if any(rank.waits for rank in ranks)]
    several = [(cell, ranks) for cell, ranks in work if len(ranks) > 1]
    if not several:
        return ""
    most = max(len(ranks) for _, ranks in several)
    rows = [[cell, *(_share(rank.waiting) for rank in ranks)] for cell, ranks in several if len(ranks) == most]
    return html_table(["cell", *(f"rank {i}" for i in range(most))], rows, "Share of a step in which a rank waits")


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
