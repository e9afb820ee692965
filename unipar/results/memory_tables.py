"""What cells hold, beside one another: by category at the fullest moment of the largest rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from unipar.memory.account import Account, Phase
from unipar.memory.cuda_total import there
from unipar.memory.sources.malloc_build import SETTLED
from unipar.utils.table import Remark, blocks, table_remarks
from unipar.utils.text import format_size

_COLUMNS: Final = {
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

_COUNTED: Final = {
    "malloc": "every block counted",
    "torch's own allocator": "only torch's own tensors counted",
    "torch's CUDA allocator": "what torch's CUDA allocator gave counted",
}
"""What is counted, by how the account's method begins."""

RSS: Final = Remark(column="RSS", text="RSS: peak of the largest rank; no ranking: the allocator keeps what is freed")
"""What the column says that stands in place of allocated memory, where that was not measured."""


def fullest(accounts: Sequence[Account]) -> Account:
    """The rank that allocates the most."""
    return max(accounts, key=lambda account: account.peak.peak)


def largest(accounts: Sequence[Account]) -> int:
    return fullest(accounts).peak.peak


def resident(accounts: Sequence[Account]) -> int | None:
    """Beyond its base, of the rank where it is the most."""
    found = [a.resident.peak - a.resident.base for a in accounts if a.resident is not None]
    return max(found) if found else None


def hosts(accounts: Sequence[Account]) -> int | None:
    """Beside CUDA: of the rank where it is the most, what malloc gave and what is pinned, each at its fullest."""
    found = [a.host.peak.peak + most(a.pinned) for a in accounts if a.host is not None and a.host.phases]
    return max(found) if found else None


def most(phases: Sequence[Phase]) -> int:
    return max((phase.peak for phase in phases), default=0)


def varied(cells: Iterable[tuple[str, Sequence[Account]]]) -> list[str]:
    """Between what the peaks of the watched steps lie, where they differ."""
    found = [(cell, peaks) for cell, accounts in cells if len(peaks := fullest(accounts).peaks) > 1]
    said = [f"{c} {low} to {high}" for c, p in found if (low := format_size(min(p))) != (high := format_size(max(p)))]
    rest = "; elsewhere they are the same" if len(said) < len(found) else ""
    return [f"peaks of the watched steps: {', '.join(said)}{rest}"] if said else []


def included(accounts: Iterable[Account]) -> str:
    """What the figures hold, which depends on who counted."""
    said = sorted({_COUNTED.get(a.method.partition(",")[0], f"counted by: {a.method}") for a in accounts})
    return said[0] if len(said) == 1 else f"not counted alike by every rank ({'; '.join(said)})"


def here(accounts: Sequence[Account]) -> int | None:
    """What the fullest rank had of this machine: on CUDA reserved, else resident; None where nobody looked."""
    reserved = fullest(accounts).reserved
    return resident(accounts) if reserved is None else reserved


def memory_tables(cells: Sequence[tuple[str, int, Sequence[Account]]], width: int) -> list[str]:
    """How much each cell takes in its world of so many ranks, seen in three ways; then what for."""
    header: tuple[str, ...] = ("memory", "fullest in", "allocated", "resident", "on CUDA")
    rows = [_sized(*cell) for cell in cells]
    if any(a.on is not None for *_, accounts in cells for a in accounts):
        header = ("memory", "fullest in", "allocated", "reserved", "gaps", "on CUDA", "host")
        rows = [_on_cuda(*cell) for cell in cells]
    lines = [line for block in blocks(header, rows, right=range(2, len(header)), width=width) for line in block]
    parts = [("MiB", *_COLUMNS), *(_parts(cell, accounts) for cell, _, accounts in cells)]
    right = range(1, len(_COLUMNS) + 1)
    made = [line for block in blocks(parts[0], parts[1:], right=right, width=width) for line in block]
    return [*lines, "", *made]


def _sized(cell: str, ranks: int, accounts: Sequence[Account]) -> tuple[str, ...]:
    account = fullest(accounts)
    resides = resident(accounts)
    return (
        cell,
        account.peak.name,
        format_size(account.peak.peak),
        _known(resides),
        format_size(there(account, ranks).total),
    )


def _on_cuda(cell: str, ranks: int, accounts: Sequence[Account]) -> tuple[str, ...]:
    account = fullest(accounts)
    peak = account.peak
    took = format_size(there(account, ranks).total)
    gaps = account.gaps(peak)
    return (
        cell,
        peak.name,
        format_size(peak.peak),
        _known(account.reserved),
        _known(gaps),
        took,
        _known(hosts(accounts)),
    )


def _known(number: int | None) -> str:
    return "-" if number is None else format_size(number)


def _parts(cell: str, accounts: Sequence[Account]) -> tuple[str, ...]:
    held = fullest(accounts).peak.held
    sums = (sum(size for category, size in held.items() if category in group) for group in _COLUMNS.values())
    return (cell, *(mib(total) if total else "-" for total in sums))


def mib(number: int) -> str:
    exact = number / 2**20
    return f"{exact:.0f}" if abs(exact) >= 9.95 else f"{exact:.1f}"


def remarks(accounts: Sequence[Account]) -> list[Remark]:
    """What the columns mean."""
    gpus = sorted({a.on.name for a in accounts if a.on is not None})
    if not gpus:
        return table_remarks(
            f"allocated here: the peak beyond the base of the largest rank, {included(accounts)}; "
            "its parts add up to it",
            "resident here: the same as the system counts it; on CUDA: predicted, allocated + context + NCCL + "
            "rounding",
            *settled(accounts),
        )
    measured = all(a.on.beside is not None for a in accounts if a.on is not None)
    took = "measured, what NVML counts for the process" if measured else "reserved + context + NCCL, both assumed"
    peak = f"the peak beyond the base of the largest rank, as torch's allocator on {', '.join(gpus)} counts it"
    others = table_remarks(
        "reserved: the most that the allocator had of the device; gaps: what of that nobody had in the fullest phase",
        f"on CUDA: {took}; host: the same rank's own memory beyond its base, and pinned pages",
        *settled(accounts),
    )
    return [Remark(column="allocated", text=f"allocated: {peak}"), *others]


def settled(accounts: Iterable[Account]) -> list[str]:
    """What only the environment can set, where the host's memory was watched."""
    if not any(a.device == "cpu" or a.host is not None for a in accounts):
        return []
    always, watched = (f"{name}={value}" for name, value in SETTLED.items())
    return [f"set: {always} always, {watched} while watched"]
