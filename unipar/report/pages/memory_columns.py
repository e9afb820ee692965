"""Memory on a page, in three columns: allocated here, resident or reserved here, and on CUDA."""

from __future__ import annotations

from unipar.memory.cuda_total import ASSUMED, there
from unipar.report.pages.elements import listed, said
from unipar.results.memory_tables import fullest, here
from unipar.results.row import Row
from unipar.utils.text import format_size

NONE = "–"


def columns(*, cuda: bool, measured: bool) -> list[str]:
    """The heads of those in which memory is always shown."""
    there = "measured" if cuda and measured else "predicted"
    return ["allocated here", "reserved here" if cuda else "resident here", f"on CUDA ({there})"]


def meant(*, cuda: bool, measured: bool) -> str:
    """What these columns are."""
    return said(
        "Allocated: measured, on the largest rank, beyond what it held before the model was built. Resident: the "
        "same as the system counts it, files left out; where memory was not measured the peak RSS of the timed "
        "run (~), which is no ranking. "
        + ("Reserved: the most that torch's allocator had of the device. " if cuda else "")
        + ("" if measured else "On CUDA: not measured, see the assumptions below."),
        "note",
    )


def assumptions() -> str:
    """Of what is predicted on CUDA."""
    return "<h3>On CUDA: assumed, not measured</h3>" + listed(ASSUMED)


def three(row: Row, ranks: int) -> list[str]:
    """The columns in which memory is always shown, in its world of so many ranks."""
    rss = f"~{format_size(max(row.peak_rss))}" if row.peak_rss else NONE
    if not row.memory:
        return [NONE, rss, NONE]
    account, taken = fullest(row.memory), here(row.memory)
    return [
        format_size(account.peak.peak),
        rss if taken is None else format_size(taken),
        format_size(there(account, ranks).total),
    ]
