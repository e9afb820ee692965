"""Lines of a forecast: cells whose predicted peaks are about the same on every number of ranks share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unipar.results.forecast.records import CellForecast, Forecast

SAME_LINE: Final = 0.01
"""Share by which peaks may differ on every number of ranks for two cells to share a line."""


@dataclass(frozen=True)
class ForecastLine:
    """Predicted peaks by number of ranks, of one cell or of several."""

    cells: tuple[str, ...]
    peaks: dict[int, int]

    def label(self, most: int) -> str:
        """Return the names in at most so many letters if possible: all, or the first and a count."""
        names = ", ".join(self.cells)
        return (
            names if len(names) <= most or len(self.cells) == 1 else f"{self.cells[0]} and {len(self.cells) - 1} more"
        )

    def follows(self, cell: CellForecast) -> bool:
        """Return whether the cell's peaks are about those of the line."""
        peaks = peaks_by_ranks(cell)
        return peaks.keys() == self.peaks.keys() and all(
            abs(peak - self.peaks[ranks]) <= SAME_LINE * self.peaks[ranks] for ranks, peak in peaks.items()
        )


def peaks_by_ranks(cell: CellForecast) -> dict[int, int]:
    """Return the cell's predicted peaks by number of ranks, where it has one."""
    return {world.ranks: world.peak or 0 for world in cell.planned_worlds}


def forecast_lines(forecast: Forecast) -> list[ForecastLine]:
    """Return the lines of all cells that were planned, in the order of the cells."""
    lines: list[ForecastLine] = []
    for cell in forecast.cells:
        if not (peaks := peaks_by_ranks(cell)):
            continue
        at = next((i for i, line in enumerate(lines) if line.follows(cell)), None)
        if at is None:
            lines.append(ForecastLine((cell.cell,), peaks))
        else:
            lines[at] = ForecastLine((*lines[at].cells, cell.cell), lines[at].peaks)
    return lines


def ranks_with_other_batch(forecast: Forecast) -> list[int]:
    """Return the numbers of ranks on which some cell was planned with another total batch than the compared one."""
    other = (w for cell in forecast.cells for w in cell.planned_worlds if w.samples != forecast.samples)
    return sorted({world.ranks for world in other})
