"""Memory on a page, in three columns: allocated here, resident or reserved here, and on CUDA."""

from __future__ import annotations

from unipar.report.cuda import ASSUMED, Measured, Predicted, there
from unipar.report.markup import listed, said
from unipar.report.memory import resident
from unipar.report.seen import Seen
from unipar.report.table import size

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


def three(cell: Seen, ranks: int) -> list[str]:
    """The columns in which memory is always shown, in its world of so many ranks."""
    account = cell.fullest
    rss = f"~{size(max(cell.row.peak_rss))}" if cell.row.peak_rss else NONE
    if account is None:
        return [NONE, rss, NONE]
    resides = resident(cell.memory)
    here = rss if resides is None else size(resides)
    if account.reserved is not None:
        here = size(account.reserved)
    return [size(cell.peak), here, size(took(cell, ranks).total)]


def took(cell: Seen, ranks: int) -> Predicted | Measured:
    """Of its fullest rank on CUDA."""
    assert cell.fullest is not None
    return there(cell.fullest, ranks)
