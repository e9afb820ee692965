"""What cells hold, beside one another: by category at the fullest moment of the largest rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unipar.memory.account import Account
from unipar.report.cuda import predicted
from unipar.report.table import blocks, size

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


def fullest(accounts: Sequence[Account]) -> Account:
    """The rank that allocates the most."""
    return max(accounts, key=lambda account: account.peak.peak)


def largest(accounts: Sequence[Account]) -> int:
    return fullest(accounts).peak.peak


def resident(accounts: Sequence[Account]) -> int | None:
    """Beyond its base, of the rank where it is the most."""
    found = [a.resident.peak - a.resident.base for a in accounts if a.resident is not None]
    return max(found) if found else None


def memory_tables(cells: Sequence[tuple[str, Sequence[Account]]], width: int) -> list[str]:
    """How much each cell takes, seen in three ways; then what for."""
    header = ("memory", "fullest in", "allocated", "resident", "on CUDA")
    rows = [_sized(cell, accounts) for cell, accounts in cells]
    lines = [line for block in blocks(header, rows, right=(2, 3, 4), width=width) for line in block]
    parts = [("MiB", *_COLUMNS), *(_parts(cell, accounts) for cell, accounts in cells)]
    right = range(1, len(_COLUMNS) + 1)
    made = [line for block in blocks(parts[0], parts[1:], right=right, width=width) for line in block]
    return [*lines, "", *made]


def _sized(cell: str, accounts: Sequence[Account]) -> tuple[str, ...]:
    account = fullest(accounts)
    resides = resident(accounts)
    there = size(predicted(account, len(accounts)).total)
    return cell, account.peak.name, size(account.peak.peak), "-" if resides is None else size(resides), there


def _parts(cell: str, accounts: Sequence[Account]) -> tuple[str, ...]:
    held = fullest(accounts).peak.held
    sums = (sum(size for category, size in held.items() if category in group) for group in _COLUMNS.values())
    return (cell, *(mib(total) if total else "-" for total in sums))


def mib(number: int) -> str:
    exact = number / 2**20
    return f"{exact:.0f}" if abs(exact) >= 9.95 else f"{exact:.1f}"


REMARKS: Final = (
    "allocated here: the peak beyond the base of the largest rank, every block counted; its parts add up to it",
    "resident here: the same as the system counts it; on CUDA: predicted, allocated + context + NCCL + rounding",
)
