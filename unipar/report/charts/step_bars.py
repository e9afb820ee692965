"""Figures with stacked bars: memory at the peak of each phase by category, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unipar.memory.account import MemoryAccount
from unipar.report.charts.bars import BarRows, byte_ticks, draw_stacked_bar
from unipar.report.charts.svg import line_class, round_ticks
from unipar.results.observation_table import STEP_PARTS
from unipar.utils.text import format_duration, format_size

_ROOM_FOR_VALUES: Final = 84


def draw_phase_memory(account: MemoryAccount, before: MemoryAccount | None, width: int) -> str:
    """Draw the peak of each phase by category; with `before`, an earlier account's as a thin bar below."""
    old = {phase.name: phase for phase in before.phases} if before is not None else {}
    high = max(phase.peak for phase in (*account.phases, *old.values()))
    names = [phase.name for phase in account.phases]
    rows = BarRows(
        names, width, 38 if old else 30, high, "Memory at the peak of each phase, by category", _ROOM_FOR_VALUES
    )
    rows.grid(byte_ticks(high, 3 if rows.small else 5))
    for i, phase in enumerate(account.phases):
        rows.draw_name(i)
        end = draw_stacked_bar(rows, phase.held, rows.y(i) + 4, 20, phase.name)
        rows.drawing.text(end + 7, rows.y(i) + 18, format_size(phase.peak), "value")
        if (was := old.get(phase.name)) is not None:
            end = draw_stacked_bar(rows, was.held, rows.y(i) + 26, 5, f"before, {phase.name}")
            rows.drawing.text(end + 7, rows.y(i) + 33, format_size(was.peak), "faint")
    return str(rows.drawing)


@dataclass(frozen=True)
class StepTime:
    """Time of a step, with its parts."""

    name: str
    seconds: float
    parts: Mapping[str, float]


def step_part_colours(times: Sequence[StepTime]) -> list[tuple[str, str]]:
    """Return class and name of each part that any of these steps has, for a legend."""
    return [(line_class(i), part) for i, part in enumerate(STEP_PARTS) if any(time.parts.get(part) for time in times)]


def draw_step_parts(times: Sequence[StepTime], width: int) -> str:
    """Draw a bar for each step's time, stacked from its parts."""
    high = max(max(time.seconds, sum(time.parts.values())) for time in times)
    rows = BarRows([time.name for time in times], width, 30, high, "Parts of a step's time", _ROOM_FOR_VALUES)
    rows.grid([(v, format_duration(v) if v else "0") for v in round_ticks(0, high, 3 if rows.small else 5)])
    for i, time in enumerate(times):
        rows.draw_name(i)
        end = 0.0
        for j, part in enumerate(STEP_PARTS):
            if seconds := time.parts.get(part, 0.0):
                start, end = end, end + seconds
                tip = f"{time.name}, {part}: {format_duration(seconds)}"
                size = max(rows.x(end) - rows.x(start) - 1, 0.6)
                rows.drawing.rect(rows.x(start), rows.y(i) + 4, size, 20, f"{line_class(j)} at", tip)
        at = rows.x(max(end, time.seconds))
        rows.drawing.text(at + 7, rows.y(i) + 18, format_duration(time.seconds), "value")
    return str(rows.drawing)
