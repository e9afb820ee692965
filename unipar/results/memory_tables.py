"""What cells hold, beside one another: by category at the fullest moment of the largest rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.memory.cuda_total import total_on_cuda
from unipar.memory.sources.malloc_build import METER_ENVIRONMENT
from unipar.utils.table import Remark, format_table_rows, table_remarks
from unipar.utils.text import format_size

_CATEGORIES_BY_COLUMN: Final = {
    "param": ("parameters", "masters"),
    "grad": ("gradients",),
    "optim": ("optimizer",),
    "comm": ("communication",),
    "activ": ("activations",),
    "temp": ("temporaries",),
    "rest": ("buffers", "library", "runtime"),
    "?": ("unattributed",),
}
"""Columns of the table, and the categories in each."""

_COUNTING_NOTES: Final = {
    "malloc": "every block counted",
    "torch's own allocator": "only torch's own tensors counted",
    "torch's CUDA allocator": "what torch's CUDA allocator gave counted",
}
"""What is counted, by how the account's method begins."""

RSS: Final = Remark(column="RSS", text="RSS: peak of the largest rank; no ranking: the allocator keeps what is freed")
"""What the column says that stands in place of allocated memory, where that was not measured."""


def largest_account(accounts: Sequence[MemoryAccount]) -> MemoryAccount:
    """The rank that allocates the most."""
    return max(accounts, key=lambda account: account.peak.peak)


def largest_peak_bytes(accounts: Sequence[MemoryAccount]) -> int:
    return largest_account(accounts).peak.peak


def largest_resident_bytes(accounts: Sequence[MemoryAccount]) -> int | None:
    """Beyond its base, of the rank where it is the most."""
    found = [a.resident.peak - a.resident.base for a in accounts if a.resident is not None]
    return max(found) if found else None


def largest_host_bytes(accounts: Sequence[MemoryAccount]) -> int | None:
    """Beside CUDA: of the rank where it is the most, what malloc gave and what is pinned, each at its fullest."""
    found = [a.host.peak.peak + highest_phase_peak(a.pinned) for a in accounts if a.host is not None and a.host.phases]
    return max(found) if found else None


def highest_phase_peak(phases: Sequence[PhasePeak]) -> int:
    return max((phase.peak for phase in phases), default=0)


def describe_peak_ranges(cells: Iterable[tuple[str, Sequence[MemoryAccount]]]) -> list[str]:
    """Between what the peaks of the watched steps lie, where they differ."""
    found = [(cell, peaks) for cell, accounts in cells if len(peaks := largest_account(accounts).peaks) > 1]
    said = [f"{c} {low} to {high}" for c, p in found if (low := format_size(min(p))) != (high := format_size(max(p)))]
    rest = "; elsewhere they are the same" if len(said) < len(found) else ""
    return [f"peaks of the watched steps: {', '.join(said)}{rest}"] if said else []


def describe_counting(accounts: Iterable[MemoryAccount]) -> str:
    """What the figures hold, which depends on who counted."""
    said = sorted({_COUNTING_NOTES.get(a.method.partition(",")[0], f"counted by: {a.method}") for a in accounts})
    return said[0] if len(said) == 1 else f"not counted alike by every rank ({'; '.join(said)})"


def bytes_on_this_machine(accounts: Sequence[MemoryAccount]) -> int | None:
    """What the fullest rank had of this machine: on CUDA reserved, else resident; None where nobody looked."""
    reserved = largest_account(accounts).reserved
    return largest_resident_bytes(accounts) if reserved is None else reserved


def format_memory_tables(cells: Sequence[tuple[str, int, Sequence[MemoryAccount]]], width: int) -> list[str]:
    """How much each cell takes in its world of so many ranks, seen in three ways; then what for."""
    header: tuple[str, ...] = ("memory", "fullest in", "allocated", "resident", "on CUDA")
    rows = [_host_memory_row(*cell) for cell in cells]
    if any(a.on is not None for *_, accounts in cells for a in accounts):
        header = ("memory", "fullest in", "allocated", "reserved", "gaps", "on CUDA", "host")
        rows = [_cuda_memory_row(*cell) for cell in cells]
    lines = [
        line for block in format_table_rows(header, rows, right=range(2, len(header)), width=width) for line in block
    ]
    parts = [("MiB", *_CATEGORIES_BY_COLUMN), *(_category_row(cell, accounts) for cell, _, accounts in cells)]
    right = range(1, len(_CATEGORIES_BY_COLUMN) + 1)
    made = [line for block in format_table_rows(parts[0], parts[1:], right=right, width=width) for line in block]
    return [*lines, "", *made]


def _host_memory_row(cell: str, ranks: int, accounts: Sequence[MemoryAccount]) -> tuple[str, ...]:
    account = largest_account(accounts)
    resides = largest_resident_bytes(accounts)
    return (
        cell,
        account.peak.name,
        format_size(account.peak.peak),
        _size_or_dash(resides),
        format_size(total_on_cuda(account, ranks).total),
    )


def _cuda_memory_row(cell: str, ranks: int, accounts: Sequence[MemoryAccount]) -> tuple[str, ...]:
    account = largest_account(accounts)
    peak = account.peak
    took = format_size(total_on_cuda(account, ranks).total)
    gaps = account.gaps(peak)
    return (
        cell,
        peak.name,
        format_size(peak.peak),
        _size_or_dash(account.reserved),
        _size_or_dash(gaps),
        took,
        _size_or_dash(largest_host_bytes(accounts)),
    )


def _size_or_dash(number: int | None) -> str:
    return "-" if number is None else format_size(number)


def _category_row(cell: str, accounts: Sequence[MemoryAccount]) -> tuple[str, ...]:
    held = largest_account(accounts).peak.held
    sums = (
        sum(size for category, size in held.items() if category in group) for group in _CATEGORIES_BY_COLUMN.values()
    )
    return (cell, *(format_mib(total) if total else "-" for total in sums))


def format_mib(number: int) -> str:
    exact = number / 2**20
    return f"{exact:.0f}" if abs(exact) >= 9.95 else f"{exact:.1f}"


def describe_memory_columns(accounts: Sequence[MemoryAccount]) -> list[Remark]:
    """What the columns mean."""
    gpus = sorted({a.on.name for a in accounts if a.on is not None})
    if not gpus:
        return table_remarks(
            f"allocated here: the peak beyond the base of the largest rank, {describe_counting(accounts)}; "
            "its parts add up to it",
            "resident here: the same as the system counts it; on CUDA: predicted, allocated + context + NCCL + "
            "rounding",
            *describe_allocator_settings(accounts),
        )
    measured = all(a.on.beside is not None for a in accounts if a.on is not None)
    took = "measured, what NVML counts for the process" if measured else "reserved + context + NCCL, both assumed"
    peak = f"the peak beyond the base of the largest rank, as torch's allocator on {', '.join(gpus)} counts it"
    others = table_remarks(
        "reserved: the most that the allocator had of the device; gaps: what of that nobody had in the fullest phase",
        f"on CUDA: {took}; host: the same rank's own memory beyond its base, and pinned pages",
        *describe_allocator_settings(accounts),
    )
    return [Remark(column="allocated", text=f"allocated: {peak}"), *others]


def describe_allocator_settings(accounts: Iterable[MemoryAccount]) -> list[str]:
    """What only the environment can set, where the host's memory was watched."""
    if not any(a.device == "cpu" or a.host is not None for a in accounts):
        return []
    always, watched = (f"{name}={value}" for name, value in METER_ENVIRONMENT.items())
    return [f"set: {always} always, {watched} while watched"]
