"""Footnote † of the memory figure: what the library's default sizes cost."""

from __future__ import annotations

from dataclasses import replace

from unipar.config import Cell, Config
from unipar.report.data.comparison_data import CellPageData, ComparisonPageData
from unipar.report.data.headline import CATEGORY_LABELS, category_differences
from unipar.utils.text import format_size


def library_default_note(page: ComparisonPageData, cell: CellPageData) -> str:
    """Return the peak of `cell` compared with the same cell without the defaults and with torch alone, if measured."""
    says = f"† {cell.cell} runs {cell.says}, its default"
    if cell not in page.measured_cells:
        return f"{says}."
    says += f": {format_size(cell.peak)}"
    torch_alone = str(Cell(Config.model_fields["backend"].default))  # default backend, nothing sharded
    without, plain = (
        next((c for c in page.measured_cells if c.cell == name), None)
        for name in (str(replace(Cell.parse(cell.cell), variant=None)), torch_alone)
    )
    beside = [(without, " without them")] if without is not None else []
    beside += [(plain, "")] if plain is not None else []
    if not beside:
        return f"{says}."
    times = [f"{cell.peak / c.peak:.1f} times {c.cell}{words} ({format_size(c.peak)})" for c, words in beside]
    return f"{says}, {' and '.join(times)}{_describe_largest_category(cell, beside[0][0], plain)}."


def _describe_largest_category(cell: CellPageData, other: CellPageData, plain: CellPageData | None) -> str:
    """Return the category that grew most from `other` to `cell`; "" if the peak did not grow."""
    moved = category_differences(other, cell)
    category = max(moved, key=lambda c: moved[c])
    if moved[category] <= 0 or cell.peak <= other.peak:
        return ""
    assert cell.fullest_account is not None
    says = f"; {format_size(cell.fullest_account.peak.held[category])} of it are {CATEGORY_LABELS[category]}"
    # communication buffers are explained by the gradients that they carry, which are whole in the plain cell
    if category != "communication" or plain is None or plain.fullest_account is None:
        return says
    gradients = max(phase.held.get("gradients", 0) for phase in plain.fullest_account.phases)
    return f"{says}, for {format_size(gradients)} of gradients" if gradients else says
