"""Memory columns of a page's tables: allocated here, resident or reserved here, on CUDA, and by category."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, PhasePeak
from unipar.planning.cuda_total import CUDA_ASSUMPTIONS
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.html.elements import NO_VALUE, bullet_list, columns_table, html_table, paragraph
from unipar.results.memory_tables import MEMORY_COLUMNS, RanksMemory, bytes_on_this_machine, format_mib
from unipar.results.row import StrategyResult
from unipar.utils.columns import Column, Row, choose_columns
from unipar.utils.text import format_size


def memory_columns(
    result_of: Callable[[Row], StrategyResult], ranks_of: Callable[[Row], int], *, cuda: bool, measured: bool
) -> list[Column[Row]]:
    """Return the three memory columns, for rows that hold a result each; without accounts only RSS (~) is known."""

    def memory(row: Row) -> RanksMemory | None:
        result = result_of(row)
        return RanksMemory(result.strategy, ranks_of(row), result.memory) if result.memory else None

    def taken(row: Row) -> str | None:
        result = result_of(row)
        size = bytes_on_this_machine(result.memory) if result.memory else None
        rss = f"~{format_size(max(result.peak_rss))}" if result.peak_rss else None
        return rss if size is None else format_size(size)

    how = "measured" if cuda and measured else "predicted"
    allocated, on_cuda = choose_columns(
        MEMORY_COLUMNS, "allocated", "on_cuda", allocated="allocated here", on_cuda=f"on CUDA ({how})"
    )
    here = Column[Row]("reserved here" if cuda else "resident here", taken)
    return [allocated.of(memory), here, on_cuda.of(memory)]


def held_categories(held: Iterable[Mapping[Category, int]]) -> list[Category]:
    """Return the categories that any of these hold, in the order in which they are drawn."""
    present = {category for categories in held for category in categories}
    return [category for category in CATEGORIES if category in present]


def phase_columns(phases: Collection[PhasePeak]) -> list[Column[PhasePeak]]:
    """Return the columns of phases: name, peak, and bytes by category."""
    return [
        Column("phase", lambda phase: phase.name, right=False),
        Column("peak", lambda phase: phase.peak, format_size),
        *(
            Column[PhasePeak](CATEGORY_LABELS[c], lambda phase, c=c: phase.held.get(c), format_size)
            for c in held_categories(phase.held for phase in phases)
        ),
    ]


def phase_table(phases: Collection[PhasePeak], label: str) -> str:
    """Return a table of phases, each with its peak by category."""
    return columns_table(phase_columns(phases), phases, label)


def category_rows_table(peaks: Sequence[tuple[str, PhasePeak]], label: str) -> str:
    """Return a table with a column for each of these peaks, in MiB, and a row for each category: it is narrow."""
    rows = [["peak", *(format_mib(phase.peak) for _, phase in peaks)]]
    rows += [
        [CATEGORY_LABELS[c], *(format_mib(phase.held[c]) if phase.held.get(c) else NO_VALUE for _, phase in peaks)]
        for c in held_categories(phase.held for _, phase in peaks)
    ]
    return html_table(["MiB", *(name for name, _ in peaks)], rows, label)


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
