"""The page's first sentence: which cell is smallest, which is fastest, and why."""

from __future__ import annotations

from statistics import quantiles

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.report.data.comparison import Seen, Told
from unipar.utils.text import first_few, format_duration, format_size

WORDS: dict[Category, str] = {
    "parameters": "parameters",
    "masters": "master copies",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "communication": "communication buffers",
    "buffers": "buffers of the model",
    "activations": "activations",
    "temporaries": "temporaries",
    "library": "the library's own",
    "runtime": "runtime",
    "unattributed": "unattributed",
}


def answer(told: Told) -> str:
    """One line: memory first where it was measured, then time."""
    said = [text for text in (smallest(told), fastest(told)) if text]
    return "; ".join(said) + "." if said else "No cell came to its end, so there is nothing to rank."


def ranked(cells: list[Seen], told: Told) -> list[Seen]:
    """Without the one process, which has all samples to itself, where there is any other."""
    others = [cell for cell in cells if cell.row is not told.found.reference]
    return others or cells


def smallest(told: Told) -> str:
    cells = ranked(told.measured, told)
    if not cells:
        return ""
    first = cells[0]
    says = f"{first.cell} is smallest: {format_size(first.peak)} on its largest rank"
    other = base_of(told) or (cells[1] if len(cells) > 1 else None)
    if other is first:
        other = cells[1] if len(cells) > 1 else None
    if other is None or other.peak <= first.peak:
        return says
    moved = moves(other, first)
    category = max(moved, key=lambda c: -moved[c])
    before, after = (_held(cell).get(category, 0) for cell in (other, first))
    part = 100 * (1 - first.peak / other.peak)
    change = f"{WORDS[category]} ({format_size(before)} to {format_size(after)})"
    return f"{says}, {part:.0f} % less than {other.cell}, above all {change}"


def fastest(told: Told) -> str:
    cells = ranked(told.timed, told)
    if not cells:
        return ""
    first, *rest = cells
    low, high = halves(first)
    ties = [cell.cell for cell in rest if low <= cell.middle <= high]
    says = f"{first.cell} is fastest: {format_duration(first.middle)} a step"
    if not ties:
        return says
    return f"{says}, though {first_few(ties, most=1)} {'is' if len(ties) == 1 else 'are'} too near to tell"


def halves(cell: Seen) -> tuple[float, float]:
    """Where the middle half of its step times begins and ends."""
    if len(cell.timed) < 2:
        return cell.middle, cell.middle
    low, _, high = quantiles(cell.timed, n=4, method="inclusive")
    return low, high


def base_of(told: Told) -> Seen | None:
    """What others are held to: the comparison's baseline, where its memory is known."""
    base = told.found.baseline
    found = told.cell(base.cell) if base is not None else None
    return found if found is not None and found.fullest is not None else None


def moves(before: Seen, after: Seen) -> dict[Category, int]:
    """By category, how many bytes more the second holds at its peak."""
    one, two = _held(before), _held(after)
    return {c: two.get(c, 0) - one.get(c, 0) for c in CATEGORIES if c in one or c in two}


def _held(cell: Seen) -> dict[Category, int]:
    assert cell.fullest is not None, cell.cell
    return cell.fullest.peak.held
