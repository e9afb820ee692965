"""Figures with stacked bars: memory at the peak of each phase by category, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unipar.memory.account import PhasePeak
from unipar.report.charts.bars import BarRows, byte_ticks, draw_stacked_bar
from unipar.report.charts.svg import line_class, round_ticks
from unipar.results.observation_table import STEP_PARTS
from unipar.utils.text import format_duration, format_size

_ROOM_FOR_VALUES: Final = 84


@dataclass(frozen=True)
class PeakRow:
    """Peak of a phase, drawn as a bar; `before`: an earlier one, drawn as a thin bar below."""

    name: str
    peak: PhasePeak
    before: PhasePeak | None = None


def draw_peaks(peaks: Sequence[PeakRow], width: int) -> str:
    """Draw the peak of each phase by category, with earlier ones below."""
    high = max(phase.peak for row in peaks for phase in (row.peak, row.before) if phase is not None)
    step = 38 if any(row.before is not None for row in peaks) else 30
    label = "Memory at the peak of each phase, by category"
    rows = BarRows([row.name for row in peaks], width, step, high, label, _ROOM_FOR_VALUES)
    rows.grid(byte_ticks(high, 3 if rows.small else 5))
    for i, row in enumerate(peaks):
        rows.draw_name(i)
        end = draw_stacked_bar(rows, row.peak.held, rows.y(i) + 4, 20, row.name)
        rows.drawing.text(end + 7, rows.y(i) + 18, format_size(row.peak.peak), "value")
        if row.before is not None:
            end = draw_stacked_bar(rows, row.before.held, rows.y(i) + 26, 5, f"before, {row.name}")
            rows.drawing.text(end + 7, rows.y(i) + 33, format_size(row.before.peak), "faint")
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
