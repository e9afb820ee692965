"""What a page says of runs on CUDA: the device's allocator phase by phase, and the host's memory beside it."""

from __future__ import annotations

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, MemoryAccount, PhasePeak
from unipar.report.data.comparison import ComparisonPageData
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.pages.elements import html_section, html_table, paragraph
from unipar.utils.text import format_size

_NO_VALUE = "–"


def devices_section(told: ComparisonPageData) -> str:
    """Of the fullest rank of each cell; nothing where none ran on CUDA."""
    cells = [(c.cell, a) for c in told.measured_cells if (a := c.fullest_account) is not None and a.on is not None]
    if not cells:
        return ""
    head = ["cell", "phase", "allocated", "requested", "active", "reserved", "gaps"]
    return html_section(
        "device",
        "On the device, and beside it",
        html_table(head, [row for cell, a in cells for row in _phase_rows(cell, a)], "CUDA's memory by phase", (0, 1)),
        paragraph(
            "Allocated: beyond the base; the others from zero, as torch's allocator counts them, each at its own peak. "
            "Gaps: what it had of the device in that phase and nobody had of it.",
            "note",
        ),
        _driver_table(cells),
        _host_table(cells),
    )


def _phase_rows(cell: str, account: MemoryAccount) -> list[list[str]]:
    sizes = [(p, (p.peak, p.requested, p.active, p.reserved, account.gaps(p))) for p in account.phases]
    return [[cell, p.name, *(_NO_VALUE if s is None else format_size(s) for s in those)] for p, those in sizes]


def _driver_table(cells: list[tuple[str, MemoryAccount]]) -> str:
    """What the driver counts, where it told."""
    rows = [
        [cell, a.on.name, format_size(a.on.used), format_size(a.on.reserved), format_size(a.on.beside)]
        for cell, a in cells
        if a.on is not None and a.on.used is not None and a.on.beside is not None
    ]
    if not rows:
        return paragraph("What CUDA and NCCL take themselves was not measured.", "note")
    head = ["cell", "GPU", "the process", "torch's allocator", "context, NCCL and others"]
    return html_table(head, rows, "As the driver counts when all watched steps are done (NVML)", (0, 1))


def _host_table(cells: list[tuple[str, MemoryAccount]]) -> str:
    found: list[tuple[str, str, PhasePeak]] = []
    for cell, a in cells:
        if a.host is not None and a.host.phases:
            found.append((cell, "malloc", a.host.peak))
        if any(phase.peak for phase in a.pinned):
            found.append((cell, "pinned", max(a.pinned, key=lambda phase: phase.peak)))
    if not found:
        return paragraph("The host's memory was not watched.", "note")
    shown: list[Category] = [c for c in CATEGORIES if any(c in phase.held for _, _, phase in found)]
    rows = [
        [
            cell,
            kind,
            p.name,
            format_size(p.peak),
            *(format_size(p.held[c]) if c in p.held else _NO_VALUE for c in shown),
        ]
        for cell, kind, p in found
    ]
    head = ["cell", "by", "phase", "peak", *(CATEGORY_LABELS[c] for c in shown)]
    return html_table(head, rows, "The host's memory at its own peak", (0, 1, 2))
