"""Figures of a forecast: predicted beside measured peaks, and predicted peaks by number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from unipar.report.charts.bars import NARROW_BELOW_PIXELS, BarRows, bar_scale, byte_ticks, draw_stacked_bar
from unipar.report.charts.geometry import LabelBox, LineSegment, touches_box
from unipar.report.charts.labels import COLUMN_LINE, place_in_column
from unipar.report.charts.svg import (
    AxisScale,
    Drawing,
    Point,
    byte_unit_of,
    fit_name,
    line_class,
    power_of_two_ticks,
    text_width,
)
from unipar.report.data.forecast_data import ForecastLine, forecast_lines, ranks_with_other_batch
from unipar.results.forecast.forecast_difference import ForecastDifference
from unipar.results.forecast.records import Forecast
from unipar.utils.text import count_of, format_size

_LEFT: Final = 56
_TOP: Final = 16
_HEIGHT: Final = 300
_ROOM_ABOVE: Final = 30
"""Pixels above the scale for a limit that is not on it."""

_FAR_ABOVE: Final = {True: 4.0, False: 2.0}
"""Ratio of a limit to the highest peak above which it is not on the scale, which is logarithmic or not."""


def format_difference(off: float) -> str:
    """Return a difference as a percentage with its sign."""
    text = f"{abs(off) * 100:.2f} %"
    return text if text == "0.00 %" else f"{'−' if off < 0 else '+'}{text}"


def scale_of_pairs(pairs: Sequence[ForecastDifference]) -> tuple[float, list[str]]:
    """Return the largest value of the scale, and the few strategies beyond it, whose bars are cut."""
    return bar_scale({each.strategy: max(each.measured.peak, each.planned.peak.peak) for each in pairs})


def draw_forecast_pairs(pairs: Sequence[ForecastDifference], width: int) -> str:
    """Draw two bars for each strategy, by category: the measured peak, and below it the predicted one."""
    high, cut = scale_of_pairs(pairs)
    label = "Measured and predicted peak, by category" + "".join(
        f"; the bars of {each.strategy} are cut short, {format_size(each.measured.peak)} were measured"
        for each in pairs
        if each.strategy in cut
    )
    small = width < NARROW_BELOW_PIXELS
    rows = BarRows([each.strategy for each in pairs], width, 42, high, label, 78 if small else 178)
    rows.grid(byte_ticks(high, 3 if small else 5))
    for i, each in enumerate(pairs):
        rows.draw_name(i)
        y, planned = rows.y(i), each.planned.peak
        end = draw_stacked_bar(rows, each.measured.held, y + 4, 14, f"{each.strategy}, measured")
        rows.drawing.text(end + 7, y + 15, format_size(each.measured.peak), "value")
        end = draw_stacked_bar(rows, planned.held, y + 20, 14, f"{each.strategy}, predicted")
        words = f"{format_size(planned.peak)} predicted, {format_difference(each.off)}"
        rows.drawing.text(end + 7, y + 31, format_difference(each.off) if small else words, "faint")
    return str(rows.drawing)


@dataclass(frozen=True)
class _WorldScales:
    """Scales of the figure by number of ranks."""

    x: AxisScale
    y: AxisScale
    limit_at: float | None
    """Height of the line of the device's limit; None: it is not known."""

    off_scale: bool
    """Whether that line is above the scale."""


def draw_peaks_by_ranks(forecast: Forecast, width: int) -> str:
    """Draw a line for each strategy, or for several that coincide: predicted peak by number of ranks."""
    small = width < NARROW_BELOW_PIXELS
    lines = forecast_lines(forecast)
    drawn = [line for line in lines if len(line.peaks) > 1]
    words = {_name(line): str(i) if small else line.label(36) for i, line in enumerate(drawn, 1)}
    words = words if small else {name: fit_name(text, 300) for name, text in words.items()}
    column = width - 8 - max(map(text_width, words.values()), default=0)
    scales = _scales(forecast, lines, column - (22 if small else 34), max(_HEIGHT, COLUMN_LINE * len(drawn)))
    x, y = scales.x, scales.y
    listed = 18 * len(words) + 8 if small else 0
    drawing = Drawing(width, y.start + 48 + listed, "Predicted peak of the fullest rank, by number of ranks")
    change = _draw_batch_change(drawing, forecast, x, y)
    _draw_frame(drawing, forecast, lines, scales)
    ends = {_name(line): (x(max(line.peaks)), y(line.peaks[max(line.peaks)])) for line in drawn}
    labels = place_in_column(ends, words, column, y.end, y.start) if ends else {}
    for label in labels.values():
        if label.leader is not None:
            drawing.line(*label.leader, "leader")
    for i, line in enumerate(drawn):
        _draw_line(drawing, line, line_class(i), x, y)
    for line in lines:
        if len(line.peaks) == 1:
            ((ranks, peak),) = line.peaks.items()
            drawing.dot((x(ranks), y(peak)), 5, "point", _tip(line, ranks, peak))
    for name, label in labels.items():
        drawing.text(*label.text, words[name], "name label", label.anchor)
    places = [[(x(ranks), y(peak)) for ranks, peak in line.peaks.items()] for line in lines]
    if change is not None:
        text = "share kept" if small else "each rank keeps its share of the batch"
        at = _free_baseline((y.end + 15, y.start - 7), (change, change + text_width(text)), places)
        drawing.text(change + 5, at, text, "tick label")
    if scales.limit_at is not None and forecast.limit is not None:
        text = f"limit: {format_size(forecast.limit)}{', not to scale' if scales.off_scale else ''}"
        sides = scales.limit_at - 5, scales.limit_at + 15
        at = _free_baseline(sides, (x.end - text_width(text), x.end), places)
        drawing.text(x.end, at, text, "tick label", "end")
    for i, line in enumerate(drawn if small else ()):
        text = fit_name(f"{i + 1}  {line.label(int(width / 7.2) - 4)}", width)
        drawing.text(0, y.start + 48 + 18 * i + 14, text, "name")
    return str(drawing)


def _free_baseline(
    baselines: tuple[float, float], across: tuple[float, float], lines: Sequence[Sequence[Point]]
) -> float:
    """Return the first of two places for a text that no line crosses, or else the first."""

    def is_free(baseline: float) -> bool:
        box = LabelBox(across[0], baseline - 12, across[1], baseline + 4)
        return not any(touches_box(LineSegment(a, b), box) for line in lines for a, b in pairwise(line))

    return next((baseline for baseline in baselines if is_free(baseline)), baselines[0])


def _name(line: ForecastLine) -> str:
    return line.strategies[0]


def _tip(line: ForecastLine, ranks: int, peak: int) -> str:
    return f"{', '.join(line.strategies)}, {count_of(ranks, 'rank')}: {format_size(peak)}"


def _draw_line(drawing: Drawing, line: ForecastLine, kind: str, x: AxisScale, y: AxisScale) -> None:
    drawing.polyline([(x(ranks), y(peak)) for ranks, peak in line.peaks.items()], f"way {kind}")
    for ranks, peak in line.peaks.items():
        drawing.dot((x(ranks), y(peak)), 3, f"at {kind}", _tip(line, ranks, peak))


def _scales(forecast: Forecast, lines: Sequence[ForecastLine], end: float, height: float) -> _WorldScales:
    peaks = [peak for line in lines for peak in line.peaks.values()]
    ranks = _all_ranks(lines)
    low, high, limit = min(peaks), max(peaks), forecast.limit
    log = high > 4 * low
    off = limit is not None and limit > _FAR_ABOVE[log] * high
    if limit is not None and not off:
        low, high = min(low, limit), max(high, limit)
    top = _TOP + (_ROOM_ABOVE if off else 0)
    y = AxisScale(low / 1.2 if log else 0, high * (1.2 if log else 1.08), top + height, top, log)
    at = None if limit is None else _TOP if off else y(limit)
    x = AxisScale(ranks[0], max(ranks[-1], ranks[0] + 1), _LEFT + 6, end, log=True)
    return _WorldScales(x, y, at, off)


def _all_ranks(lines: Sequence[ForecastLine]) -> list[int]:
    return sorted({ranks for line in lines for ranks in line.peaks})


def _draw_frame(drawing: Drawing, forecast: Forecast, lines: Sequence[ForecastLine], scales: _WorldScales) -> None:
    """Draw the grid, the marks of both axes, the compared world, and the line of the device."""
    x, y = scales.x, scales.y
    marks = byte_ticks(y.high, 5)
    if y.log:
        marks = [(v, format_size(v)) for v in power_of_two_ticks(y.low, y.high, byte_unit_of(y.high))]
    for value, text in marks:
        drawing.line((_LEFT, y(value)), (x.end, y(value)), "grid")
        drawing.text(_LEFT - 6, y(value) + 4, text, "tick", "end")
    for ranks in _marked_ranks(_all_ranks(lines), x):
        drawing.text(x(ranks), y.start + 18, str(ranks), "tick", "middle")
    here, words = x(forecast.ranks), f"compared: {forecast.ranks}"
    drawing.line((here, y.start), (here, y.end), "link")
    drawing.text(max(here - text_width(words) / 2, 0), y.start + 36, words, "tick")
    drawing.text(x.end, y.start + 36, f"ranks, logarithmic scale{'s' * y.log}", "tick", "end")
    if scales.limit_at is not None:
        drawing.line((_LEFT, scales.limit_at), (x.end, scales.limit_at), "limit")
        if scales.off_scale:
            middle = (scales.limit_at + y.end) / 2
            for shift in (-3, 3):
                drawing.line((_LEFT - 5, middle + shift + 3), (_LEFT + 5, middle + shift - 3), "cut")


def _marked_ranks(ranks: Sequence[int], x: AxisScale) -> list[int]:
    """Return the numbers to be marked, with the last one: each, each second, ..., so that their texts do not touch."""
    for step in range(1, len(ranks)):
        marked = [*ranks[::-1][::step]][::-1]
        widths = [(text_width(str(a)) + text_width(str(b))) / 2 for a, b in pairwise(marked)]
        if all(x(b) - x(a) >= room + 2 for (a, b), room in zip(pairwise(marked), widths, strict=True)):
            return marked
    return [ranks[-1]]


def _draw_batch_change(drawing: Drawing, forecast: Forecast, x: AxisScale, y: AxisScale) -> float | None:
    """Shade the larger worlds in which each rank keeps its share of the batch; return where they begin, or None."""
    later = [ranks for ranks in ranks_with_other_batch(forecast) if ranks > forecast.ranks]
    if not later:
        return None
    start = x(later[0] / 2**0.5)
    drawing.rect(start, y.end, x.end - start, y.start - y.end, "phase")
    return start
