"""Section of the comparison page on failed cells: their memory until they failed."""

from __future__ import annotations

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.report.data.comparison_data import CellPageData, ComparisonPageData
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.html.elements import html_section, html_table, paragraph
from unipar.utils.text import format_size


def failed_cells_section(page: ComparisonPageData) -> str:
    """Return the section, or "" if no failed cell has a memory account."""
    if not page.failed_cells:
        return ""
    return html_section(
        "till",
        "Until it failed",
        paragraph("These cells did not finish, and are not ranked."),
        *(part for cell in page.failed_cells for part in _failed_cell_parts(cell)),
    )


def _failed_cell_parts(cell: CellPageData) -> tuple[str, str]:
    account = cell.fullest_account
    assert account is not None
    shown: list[Category] = [c for c in CATEGORIES if any(c in phase.held for phase in account.phases)]
    rows = [
        [p.name, format_size(p.peak), *(format_size(p.held[c]) if c in p.held else "–" for c in shown)]
        for p in account.phases
    ]
    head = ["phase", "peak", *(CATEGORY_LABELS[c] for c in shown)]
    where = f" {cell.row.at}" if cell.row.at else ""
    reason = cell.row.note.splitlines()[0] if cell.row.note else "the reason is not known"
    sentence = f"{cell.cell} failed{where}: {reason}"
    return paragraph(sentence), html_table(head, rows, f"{cell.cell}, by phase, until it failed", (0,))
