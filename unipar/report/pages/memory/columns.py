"""Memory columns of a page's tables: allocated here, resident or reserved here, and on CUDA."""

from __future__ import annotations

from unipar.planning.cuda_total import CUDA_ASSUMPTIONS, total_on_cuda
from unipar.report.html.elements import bullet_list, paragraph
from unipar.results.memory_tables import bytes_on_this_machine, largest_account
from unipar.results.row import StrategyResult
from unipar.utils.text import format_size

_NO_VALUE = "–"


def memory_column_heads(*, cuda: bool, measured: bool) -> list[str]:
    """Return the heads of the three memory columns."""
    how = "measured" if cuda and measured else "predicted"
    return ["allocated here", "reserved here" if cuda else "resident here", f"on CUDA ({how})"]


def column_notes(*, cuda: bool, measured: bool) -> str:
    """Return a note that says what the memory columns mean."""
    return paragraph(
        "Allocated: measured, on the largest rank, beyond what it held before the model was built. Resident: the "
        "same as the system counts it, without mapped files; if memory was not measured, the peak RSS of the timed "
        "run (~), which is not suited to rank strategies. "
        + ("Reserved: the most that torch's allocator reserved on the device. " if cuda else "")
        + ("" if measured else "On CUDA: not measured, see the assumptions below."),
        "note",
    )


def cuda_assumptions() -> str:
    """Return the list of assumptions behind the figures that are predicted for CUDA."""
    return "<h3>On CUDA: assumed, not measured</h3>" + bullet_list(CUDA_ASSUMPTIONS)


def memory_strategies(row: StrategyResult, ranks: int) -> list[str]:
    """Return the three memory columns of a strategy that ran with `ranks` ranks."""
    rss = f"~{format_size(max(row.peak_rss))}" if row.peak_rss else _NO_VALUE
    if not row.memory:
        return [_NO_VALUE, rss, _NO_VALUE]
    account, resident = largest_account(row.memory), bytes_on_this_machine(row.memory)
    return [
        format_size(account.peak.peak),
        rss if resident is None else format_size(resident),
        format_size(total_on_cuda(account, ranks).total),
    ]
