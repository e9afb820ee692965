"""Memory of strategies as text tables: by category, at the peak of the largest rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from unipar.backend import Category
from unipar.config import Strategy
from unipar.memory.account import CATEGORIES, SENT_AXES, MemoryAccount, PhasePeak
from unipar.memory.sources.malloc_build import METER_ENVIRONMENT
from unipar.planning.cuda_total import MeasuredCudaMemory, PredictedCudaMemory, total_on_cuda
from unipar.utils.columns import Column, choose_columns, table_blocks
from unipar.utils.table import Remark, table_remarks
from unipar.utils.text import format_size

_CATEGORIES_BY_COLUMN: Final[dict[str, tuple[Category, ...]]] = {
    "param": ("parameters", "masters"),
    "grad": ("gradients",),
    "optim": ("optimizer",),
    "ema": ("averages",),
    "comm": ("communication",),
    "activ": ("activations",),
    "temp": ("temporaries",),
    "rest": ("buffers", "library", "runtime"),
    "?": ("unattributed",),
}
"""Categories in each column of the table; `ema` is left out where no strategy has averages."""

_COUNTING_NOTES: Final = {
    "malloc": "every block counted",
    "torch's own allocator": "only torch's own tensors counted",
    "torch's allocator of the device": "only blocks of torch's allocator of the device counted",
}
"""Descriptions of what is counted, by the beginning of the account's method."""

RSS: Final = Remark(column="RSS", text="RSS: peak of the largest rank; not for ranking: allocators keep freed memory")
"""Remark on the column that replaces allocated memory if that was not recorded."""


def largest_account(accounts: Sequence[MemoryAccount]) -> MemoryAccount:
    """Return the account of the rank with the highest peak."""
    return max(accounts, key=lambda account: account.peak.peak)


def largest_peak_bytes(accounts: Sequence[MemoryAccount]) -> int:
    """Return the peak of the rank with the highest one."""
    return largest_account(accounts).peak.peak


def largest_resident_bytes(accounts: Sequence[MemoryAccount]) -> int | None:
    """Return the peak of resident memory beyond its base on the largest rank, or None if no rank measured it."""
    peaks = [a.resident.peak - a.resident.base for a in accounts if a.resident is not None]
    return max(peaks) if peaks else None


def largest_host_bytes(accounts: Sequence[MemoryAccount]) -> int | None:
    """Return the host memory of a CUDA rank, the largest one: peak of malloc plus peak of pinned pages, or None."""
    peaks = [a.host.peak.peak + highest_phase_peak(a.pinned) for a in accounts if a.host is not None and a.host.phases]
    return max(peaks) if peaks else None


def highest_phase_peak(phases: Sequence[PhasePeak]) -> int:
    """Return the highest peak of these phases, or 0."""
    return max((phase.peak for phase in phases), default=0)


def describe_peak_ranges(strategies: Iterable[tuple[str, Sequence[MemoryAccount]]]) -> list[str]:
    """Return the lowest and the highest peak of the recorded steps, for strategies in which they differ."""
    all_peaks = [
        (strategy, peaks) for strategy, accounts in strategies if len(peaks := largest_account(accounts).peaks) > 1
    ]
    ranges = [(strategy, format_size(min(peaks)), format_size(max(peaks))) for strategy, peaks in all_peaks]
    texts = [f"{strategy} {low} to {high}" for strategy, low, high in ranges if low != high]
    rest = "; equal in the other strategies" if len(texts) < len(ranges) else ""
    return [f"peaks of the recorded steps: {', '.join(texts)}{rest}"] if texts else []


def describe_setup_peaks(strategies: Iterable[tuple[str, Sequence[MemoryAccount]]]) -> list[str]:
    """Return what strategies with further axes need in their steps, if their peak is of the set-up."""
    lines: list[str] = []
    for strategy, accounts in strategies:
        first, peak = largest_account(accounts), largest_account(accounts).peak
        later = [phase.peak for account in accounts for phase in account.phases if phase.name != "built"]
        if "+" in strategy and Strategy.parse(strategy).axes.split and peak.name == "built" and later:
            lines.append(
                f"{strategy}: its peak is of the set-up, in which rank {first.rank} tries the whole model; in the "
                f"steps the largest rank holds {format_size(max(later))}"
            )
    return lines


def describe_counting(accounts: Iterable[MemoryAccount]) -> str:
    """Return what the figures include, which depends on the method of recording."""
    notes = sorted({_COUNTING_NOTES.get(a.method.partition(",")[0], f"counted by: {a.method}") for a in accounts})
    return notes[0] if len(notes) == 1 else f"not counted in the same way on every rank ({'; '.join(notes)})"


def bytes_on_this_machine(accounts: Sequence[MemoryAccount]) -> int | None:
    """Return what the largest rank took of this machine: reserved on CUDA, else resident; None if not measured."""
    reserved = largest_account(accounts).reserved
    return largest_resident_bytes(accounts) if reserved is None else reserved


@dataclass(frozen=True)
class RanksMemory:
    """Memory of a strategy's ranks: its name in a table, how many ranks it has, and the accounts that they left."""

    strategy: str
    ranks: int
    accounts: Sequence[MemoryAccount]

    @property
    def largest(self) -> MemoryAccount:
        """Account of the rank with the highest peak."""
        return largest_account(self.accounts)

    @property
    def on_cuda(self) -> PredictedCudaMemory | MeasuredCudaMemory:
        """Total of that rank on CUDA."""
        return total_on_cuda(self.largest, self.ranks)


def _bytes_column(key: str, head: str, value: Callable[[RanksMemory], int | None]) -> Column[RanksMemory]:
    return Column(head, value, format_size, key=key)


MEMORY_COLUMNS: Final[Sequence[Column[RanksMemory]]] = (
    Column("fullest in", lambda row: row.largest.peak.name, key="phase", right=False),
    _bytes_column("allocated", "allocated", lambda row: row.largest.peak.peak),
    _bytes_column("resident", "resident", lambda row: largest_resident_bytes(row.accounts)),
    _bytes_column("on_cuda", "on CUDA", lambda row: row.on_cuda.total),
    _bytes_column("predicted_on_cuda", "on CUDA", lambda row: _total_if(row, PredictedCudaMemory)),
    _bytes_column("measured_on_cuda", "on CUDA", lambda row: _total_if(row, MeasuredCudaMemory)),
    _bytes_column("reserved", "reserved", lambda row: row.largest.reserved),
    _bytes_column("gaps", "gaps", lambda row: row.largest.gaps(row.largest.peak)),
    _bytes_column("host", "host", lambda row: largest_host_bytes(row.accounts)),
    _bytes_column("taken", "resident", lambda row: bytes_on_this_machine(row.accounts)),
    *(_bytes_column(c, c, lambda row, c=c: row.largest.peak.held.get(c, 0)) for c in CATEGORIES),
)
"""Memory of the largest rank; its categories add up to what is allocated."""


def _total_if(row: RanksMemory, kind: type[PredictedCudaMemory | MeasuredCudaMemory]) -> int | None:
    return row.on_cuda.total if isinstance(row.on_cuda, kind) else None


def format_memory_tables(strategies: Sequence[RanksMemory], width: int) -> list[str]:
    """Return the lines of two tables: total memory of each strategy, counted in several ways, and by category."""
    on_gpus = any(a.on is not None for row in strategies for a in row.accounts)
    keys = ("reserved", "gaps", "on_cuda", "host") if on_gpus else ("resident", "on_cuda")
    totals = [_strategy_column("memory"), *choose_columns(MEMORY_COLUMNS, "phase", "allocated", *keys)]
    groups = category_groups([row.largest for row in strategies])
    by_category = [_strategy_column("MiB"), *(category_column(*group).of(_peak_of) for group in groups.items())]
    return [*_lines(totals, strategies, width), "", *_lines(by_category, strategies, width)]


def _strategy_column(head: str) -> Column[RanksMemory]:
    """Return the first column of a table: each row's strategy, below the table's name."""
    return Column(head, lambda row: row.strategy, right=False)


def _peak_of(row: RanksMemory) -> PhasePeak:
    return row.largest.peak


def category_groups(accounts: Iterable[MemoryAccount]) -> dict[str, tuple[Category, ...]]:
    """Return the categories in each column of a table, by the column's head."""
    return group_categories(account.peak for account in accounts)


def group_categories(peaks: Iterable[PhasePeak]) -> dict[str, tuple[Category, ...]]:
    """Return the categories in each column of a table of peaks, by the column's head."""
    averages = any("averages" in peak.held for peak in peaks)
    return {head: group for head, group in _CATEGORIES_BY_COLUMN.items() if head != "ema" or averages}


def category_column(head: str, group: Sequence[Category]) -> Column[PhasePeak]:
    """Return the column of the bytes of some categories at a phase's peak."""
    return Column(
        head,
        lambda phase: sum(size for category, size in phase.held.items() if category in group) or None,
        format_mib,
    )


def _lines(columns: Sequence[Column[RanksMemory]], rows: Sequence[RanksMemory], width: int) -> list[str]:
    return [line for block in table_blocks(columns, rows, width=width, fold=True) for line in block]


def format_mib(number: int) -> str:
    """Return bytes as a number of MiB, with one decimal below 10."""
    exact = number / 2**20
    return f"{exact:.0f}" if abs(exact) >= 9.95 else f"{exact:.1f}"


def sent_axes(accounts: Iterable[MemoryAccount]) -> list[str]:
    """Return the axes along which these ranks send, in the order of columns, or nothing if that is the data's alone."""
    axes = {axis for account in accounts for axis in account.sent_along}
    known = [axis for axis in SENT_AXES if axis in axes]
    return [] if axes <= {"data"} else [*known, *sorted(axes.difference(SENT_AXES))]


def bytes_along(account: MemoryAccount, axis: str) -> int:
    """Return what a rank sends along an axis in one step, over all collectives."""
    return sum(account.sent_along.get(axis, {}).values())


def format_sent_table(strategies: Sequence[RanksMemory], width: int) -> list[str]:
    """Return the lines of a table of bytes sent by axis and between machines; none if only the data's axis sends."""
    known = [account for row in strategies for account in row.accounts]
    axes, across = sent_axes(known), sends_across(known)
    if across:
        axes = axes or ["data"]
    if not axes:
        return []

    def sent(head: str, bytes_of: Callable[[MemoryAccount], int]) -> Column[RanksMemory]:
        return Column(head, lambda row: max(map(bytes_of, row.accounts)) or None, format_size)

    columns = [_strategy_column("sent"), *(sent(axis, partial(bytes_along, axis=axis)) for axis in axes)]
    columns += [sent("between machines", lambda account: account.sent_across)] if across else []
    return ["", *_lines(columns, [row for row in strategies if row.ranks > 1], width)]


def sends_across(accounts: Iterable[MemoryAccount]) -> bool:
    """Return whether any of these ranks sends in groups on several machines."""
    return any(account.sent_across for account in accounts)


SENT_REMARK: Final = Remark(
    column="sent",
    text="sent: bytes of one step by axis of the mesh, of the rank that sends most along it; each call counts "
    "with its whole tensor",
)
"""Remark on the table of bytes sent by axis."""

ACROSS_REMARK: Final = Remark(
    column="sent",
    text="between machines: those of them in calls whose ranks are on several machines, with the whole tensor as well",
)
"""Remark on that column of it that has bytes between machines."""


def describe_memory_columns(accounts: Sequence[MemoryAccount]) -> list[Remark]:
    """Return explanations of the columns."""
    gpus = sorted({a.on.name for a in accounts if a.on is not None})
    if not gpus:
        return table_remarks(
            f"allocated here: the peak beyond the base of the largest rank, {describe_counting(accounts)}; "
            "its parts add up to it",
            "resident here: the same in private pages, as the system counts them; "
            "on CUDA: predicted, allocated + context + NCCL + rounding",
            *describe_allocator_settings(accounts),
        )
    measured = all(a.on.outside_allocator is not None for a in accounts if a.on is not None)
    took = "measured, what NVML counts for the process" if measured else "reserved + context + NCCL, both assumed"
    peak = f"the peak beyond the base of the largest rank, as torch's allocator on {', '.join(gpus)} counts it"
    others = table_remarks(
        "reserved: the most device memory that the allocator held; gaps: its unused part in the fullest phase",
        f"on CUDA: {took}; host: the same rank's own memory beyond its base, and pinned pages",
        *describe_allocator_settings(accounts),
    )
    return [Remark(column="allocated", text=f"allocated: {peak}"), *others]


def describe_allocator_settings(accounts: Iterable[MemoryAccount]) -> list[str]:
    """Return the environment variables that change the allocator, if the host's memory was recorded."""
    if not any(a.device == "cpu" or a.host is not None for a in accounts):
        return []
    always, recording = (f"{name}={value}" for name, value in METER_ENVIRONMENT.items())
    return [f"set: {always} always, {recording} while recording"]
