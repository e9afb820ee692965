"""The page's section on cells that failed: what was measured of their memory till then."""

from __future__ import annotations

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.report.data.comparison import Seen, Told
from unipar.report.data.headline import WORDS
from unipar.report.pages.elements import said, section, tabled
from unipar.utils.text import format_size


def till(told: Told) -> str:
    """Nothing where there is no such cell."""
    if not told.broken:
        return ""
    return section(
        "till",
        "Till it failed",
        said("These cells did not come to their end, and are in no ranking."),
        *(part for cell in told.broken for part in _one(cell)),
    )


def _one(cell: Seen) -> tuple[str, str]:
    account = cell.fullest
    assert account is not None
    shown: list[Category] = [c for c in CATEGORIES if any(c in phase.held for phase in account.phases)]
    rows = [
        [p.name, format_size(p.peak), *(format_size(p.held[c]) if c in p.held else "–" for c in shown)]
        for p in account.phases
    ]
    head = ["phase", "peak", *(WORDS[c] for c in shown)]
    where = f" {cell.row.at}" if cell.row.at else ""
    sentence = f"{cell.cell} failed{where}: {cell.row.note.splitlines()[0] if cell.row.note else 'it did not say why'}"
    return said(sentence), tabled(head, rows, f"{cell.cell}, by phase, till it failed", (0,))
