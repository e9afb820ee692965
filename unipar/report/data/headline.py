"""First sentence of a comparison's page: which cell is smallest, which is fastest, and why."""

from __future__ import annotations

from statistics import quantiles

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.planning.memory_margin import CellPeak, describe_no_difference, measure_margin
from unipar.report.data.comparison_data import CellPageData, ComparisonPageData
from unipar.utils.text import first_few, format_duration, format_size

CATEGORY_LABELS: dict[Category, str] = {
    "parameters": "parameters",
    "masters": "master copies",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "averages": "averages of weights",
    "communication": "communication buffers",
    "buffers": "buffers of the model",
    "activations": "activations",
    "temporaries": "temporaries",
    "library": "the library's own",
    "runtime": "runtime",
    "unattributed": "unattributed",
}
"""Names of the categories of memory, as pages show them."""


def comparison_headline(page: ComparisonPageData) -> str:
    """Return the first sentence of the page: the smallest cell (if memory was measured), then the fastest."""
    parts = [text for text in (describe_smallest_cell(page), describe_fastest_cell(page)) if text]
    return "; ".join(parts) + "." if parts else "No cell finished, so there is nothing to rank."


def cells_to_rank(cells: list[CellPageData], page: ComparisonPageData) -> list[CellPageData]:
    """Return the cells without the one-process reference, unless it is the only one: it has no ranks to share with."""
    others = [cell for cell in cells if cell.row is not page.comparison.reference]
    return others or cells


def describe_smallest_cell(page: ComparisonPageData) -> str:
    """Return which cell is smallest, by how much, and mostly in which category; "" if memory was not measured.

    If the difference is not of the training (`MemoryMargin`), return that memory does not tell, and from which size on.
    """
    cells = cells_to_rank(page.measured_cells, page)
    if not cells:
        return ""
    first = cells[0]
    says = f"{first.cell} is smallest: {format_size(first.peak)} on its largest rank"
    other = baseline_with_memory(page) or (cells[1] if len(cells) > 1 else None)
    if other is first:
        other = cells[1] if len(cells) > 1 else None
    if other is None:
        return says
    margin = measure_margin([_cell_peak(cell) for cell in cells])
    if {first.cell, other.cell} <= set(margin.alike):
        larger = [cell for cell in cells if cell.cell not in margin.alike]
        which = f"{len(margin.alike)} of the {len(cells)} strategies" if larger else "these strategies"
        most = f"; {larger[-1].cell} is largest: {format_size(larger[-1].peak)}" if larger else ""
        return describe_no_difference(margin, which, page.parameters) + most
    if other.peak <= first.peak:
        return says
    moved = category_differences(other, first)
    category = max(moved, key=lambda c: -moved[c])
    before, after = (_bytes_by_category(cell).get(category, 0) for cell in (other, first))
    part = 100 * (1 - first.peak / other.peak)
    change = f"{CATEGORY_LABELS[category]} ({format_size(before)} to {format_size(after)})"
    says += f", {part:.0f} % less than {other.cell}, mostly {change}"
    also = [name for name in margin.alike if name != first.cell] if first.cell in margin.alike else []
    return f"{says}, but memory does not tell it from {first_few(also, most=1)} at this size" if also else says


def _cell_peak(cell: CellPageData) -> CellPeak:
    """Return a cell's peak by category, and the range of its recorded peaks."""
    assert cell.fullest_account is not None, cell.cell
    peaks = cell.fullest_account.peaks
    return CellPeak(cell.cell, cell.fullest_account.peak.held, max(peaks, default=0) - min(peaks, default=0))


def describe_fastest_cell(page: ComparisonPageData) -> str:
    """Return which cell is fastest, and cells whose median is in the middle half of its step times; "" if none ran."""
    cells = cells_to_rank(page.timed_cells, page)
    if not cells:
        return ""
    first, *rest = cells
    low, high = step_time_quartiles(first)
    ties = [cell.cell for cell in rest if low <= cell.median_seconds <= high]
    says = f"{first.cell} is fastest: {format_duration(first.median_seconds)} a step"
    if not ties:
        return says
    return f"{says}, but the difference from {first_few(ties, most=1)} is within noise"


def step_time_quartiles(cell: CellPageData) -> tuple[float, float]:
    """Return the first and third quartile of a cell's step times, in seconds."""
    if len(cell.timed) < 2:
        return cell.median_seconds, cell.median_seconds
    low, _, high = quantiles(cell.timed, n=4, method="inclusive")
    return low, high


def baseline_with_memory(page: ComparisonPageData) -> CellPageData | None:
    """Return the comparison's baseline cell, or None if there is none or its memory was not measured."""
    base = page.comparison.baseline
    cell = page.cell(base.cell) if base is not None else None
    return cell if cell is not None and cell.fullest_account is not None else None


def category_differences(before: CellPageData, after: CellPageData) -> dict[Category, int]:
    """Return by category how many bytes more the second cell holds at its peak than the first."""
    one, two = _bytes_by_category(before), _bytes_by_category(after)
    return {c: two.get(c, 0) - one.get(c, 0) for c in CATEGORIES if c in one or c in two}


def _bytes_by_category(cell: CellPageData) -> dict[Category, int]:
    assert cell.fullest_account is not None, cell.cell
    return cell.fullest_account.peak.held
