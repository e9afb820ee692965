"""Section of the comparison page on CUDA: the device's allocator by phase, the driver's figures, host memory."""

from __future__ import annotations

from collections.abc import Iterable

from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.html.elements import NO_VALUE, columns_table, html_section, html_table, paragraph
from unipar.report.pages.memory.columns import phase_columns
from unipar.utils.columns import Column
from unipar.utils.text import format_size


def devices_section(page: ComparisonPageData) -> str:
    """Return the section, about the fullest rank of each strategy, or "" if no strategy ran on CUDA."""
    return accounts_section(
        "strategy", [(c.strategy, a) for c in page.measured_strategies if (a := c.fullest_account) is not None]
    )


def accounts_section(what: str, accounts: Iterable[tuple[str, MemoryAccount]]) -> str:
    """Return the section on named accounts, or "" if none is of CUDA; `what` they are named by: strategy or rank."""
    strategies = [(name, account) for name, account in accounts if account.on is not None]
    if not strategies:
        return ""
    head = [what, "phase", "allocated", "requested", "active", "reserved", "gaps"]
    return html_section(
        "device",
        "Device and host memory",
        html_table(
            head,
            [row for strategy, a in strategies for row in _phase_rows(strategy, a)],
            "CUDA's memory by phase",
            (0, 1),
        ),
        paragraph(
            "Allocated is counted beyond the base, the other columns from zero, as torch's allocator counts them, each "
            "at its own peak. Gaps: reserved on the device in that phase, but not allocated.",
            "note",
        ),
        _driver_table(what, strategies),
        _host_table(what, strategies),
    )


def _phase_rows(strategy: str, account: MemoryAccount) -> list[list[str]]:
    sizes = [(p, (p.peak, p.requested, p.active, p.reserved, account.gaps(p))) for p in account.phases]
    return [[strategy, p.name, *(NO_VALUE if s is None else format_size(s) for s in those)] for p, those in sizes]


def _driver_table(what: str, strategies: list[tuple[str, MemoryAccount]]) -> str:
    """Return the table of the driver's figures, or a sentence if there are none."""
    rows = [
        [strategy, a.on.name, format_size(a.on.used), format_size(a.on.reserved), format_size(a.on.outside_allocator)]
        for strategy, a in strategies
        if a.on is not None and a.on.used is not None and a.on.outside_allocator is not None
    ]
    if not rows:
        return paragraph("The memory that CUDA and NCCL take for themselves was not measured.", "note")
    head = [what, "GPU", "the process", "torch's allocator", "context, NCCL and others"]
    return html_table(head, rows, "As the driver counts it after all recorded steps (NVML)", (0, 1))


def _host_table(what: str, strategies: list[tuple[str, MemoryAccount]]) -> str:
    peaks: list[tuple[str, str, PhasePeak]] = []
    for strategy, a in strategies:
        if a.host is not None and a.host.phases:
            peaks.append((strategy, "malloc", a.host.peak))
        if any(phase.peak for phase in a.pinned):
            peaks.append((strategy, "pinned", max(a.pinned, key=lambda phase: phase.peak)))
    if not peaks:
        return paragraph("Host memory was not recorded.", "note")
    named: list[Column[tuple[str, str, PhasePeak]]] = [
        Column(what, lambda row: row[0], right=False),
        Column("by", lambda row: row[1], right=False),
    ]
    phases = [column.of(_phase) for column in phase_columns([phase for _, _, phase in peaks])]
    return columns_table([*named, *phases], peaks, "Host memory at its own peak")


def _phase(row: tuple[str, str, PhasePeak]) -> PhasePeak:
    return row[2]
