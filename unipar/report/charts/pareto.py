"""Figure of throughput against memory: a labelled point per strategy, and a line through those that no other beats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from unipar.report.charts.bars import NARROW_BELOW_PIXELS, byte_ticks
from unipar.report.charts.geometry import LabelBox, LineSegment
from unipar.report.charts.labels import COLUMN_LINE, PlacedLabel, place_in_column, place_labels
from unipar.report.charts.svg import (
    AxisScale,
    Drawing,
    Point,
    byte_unit_of,
    fit_name,
    power_of_two_ticks,
    round_ticks,
    text_width,
)
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.data.headline import strategies_to_rank
from unipar.utils.text import format_size

_PLOT_TOP, _PLOT_LEFT, _PLOT_HEIGHT = 14, 56, 308
_COLUMN_GAP = 30
"""Space between the plot and a column of labels, in pixels."""


@dataclass(frozen=True)
class _Values:
    """Bytes at the peak and samples a second of each strategy, now and in an earlier comparison."""

    now: Mapping[str, tuple[float, float]]
    before: Mapping[str, tuple[float, float]]
    best: tuple[str, ...]
    """Strategies that no other beats in both, smallest first."""

    def scales(self, width: float, height: float) -> tuple[AxisScale, AxisScale]:
        """Return the scales of memory and of speed in a plot that ends `width` pixels from the left."""
        xs, ys = zip(*self.now.values(), *self.before.values(), strict=True)
        log = max(xs) / min(xs) > 4
        x = AxisScale(min(xs) / 1.25 if log else 0, max(xs) * (1.25 if log else 1.12), _PLOT_LEFT, width, log)
        low = 0 if min(ys) < 0.4 * max(ys) else 0.8 * min(ys)
        return x, AxisScale(low, max(ys) * 1.08, _PLOT_TOP + height, _PLOT_TOP)


def draw_pareto(page: ComparisonPageData, before: ComparisonPageData | None, width: int) -> str:
    """Draw samples a second against memory; the line joins the strategies that no other beats in both."""
    small = width < NARROW_BELOW_PIXELS
    values = _values(page, before)
    words = {name: str(i) if small else fit_name(name, width / 3) for i, name in enumerate(values.now, 1)}
    x, y, labels = _place_points(values, words, width)
    listed = 18 * len(words) + 8 if small else 0
    drawing = Drawing(width, y.start + 50 + listed, "Samples a second against memory at the peak")
    _draw_axes(drawing, x, y, small=small)
    places = {name: (x(a), y(b)) for name, (a, b) in values.now.items()}
    drawing.polyline([places[name] for name in values.best], "front")
    for name, (a, b) in values.before.items():
        drawing.line((x(a), y(b)), places[name], "arrow")
    for label in labels.values():
        if label.leader is not None:
            drawing.line(*label.leader, "leader")
    for name, (a, b) in values.before.items():
        drawing.dot((x(a), y(b)), 4, "point before", f"before, {name}: {format_size(a)}, {b:.1f} samples/s")
    for name, (a, b) in values.now.items():
        kind = "point best" if name in values.best else "point"
        drawing.dot(places[name], 5, kind, f"{name}: {format_size(a)}, {b:.1f} samples/s")
    for name, label in labels.items():
        drawing.text(*label.text, words[name], "name label", label.anchor)
    for i, name in enumerate(words if small else ()):
        drawing.text(0, y.start + 50 + 18 * i + 14, fit_name(f"{words[name]}  {name}", width), "name")
    return str(drawing)


def _values(page: ComparisonPageData, before: ComparisonPageData | None) -> _Values:
    strategies = [c for c in page.measured_strategies if c.timed]
    old = [c for c in (before.measured_strategies if before is not None else []) if c.timed]

    def place(c: StrategyPageData, samples: int) -> tuple[float, float]:
        return max(float(c.peak), 1.0), samples / c.median_seconds

    now = {c.strategy: place(c, page.comparison.samples) for c in strategies}
    was = (
        {c.strategy: place(c, before.comparison.samples) for c in old if c.strategy in now}
        if before is not None
        else {}
    )
    return _Values(
        now, was, tuple(pareto_front({c.strategy: now[c.strategy] for c in strategies_to_rank(strategies, page)}))
    )


def _place_points(
    values: _Values, words: Mapping[str, str], width: float
) -> tuple[AxisScale, AxisScale, dict[str, PlacedLabel]]:
    """Return the scales and the labels: beside their points, or, if there is no room, in a column beside the plot."""
    x, y = values.scales(width - 12, _PLOT_HEIGHT)
    area = LabelBox(x.start, y.end + 8, width - 2, y.start)
    places, others, lines = _pixels(values, x, y)
    if (labels := place_labels(places, words, area, others, lines)) is not None:
        return x, y, labels
    left = width - 6 - max(map(text_width, words.values()))
    x, y = values.scales(left - _COLUMN_GAP, max(_PLOT_HEIGHT, COLUMN_LINE * len(words)))
    return x, y, place_in_column(_pixels(values, x, y)[0], words, left, y.end, y.start)


def _pixels(values: _Values, x: AxisScale, y: AxisScale) -> tuple[dict[str, Point], list[Point], list[LineSegment]]:
    """Return the points of the strategies, those of the earlier comparison, and the lines of the figure."""
    places = {name: (x(a), y(b)) for name, (a, b) in values.now.items()}
    others = {name: (x(a), y(b)) for name, (a, b) in values.before.items()}
    front = [LineSegment(places[one], places[two]) for one, two in pairwise(values.best)]
    return places, list(others.values()), [*front, *(LineSegment(others[name], places[name]) for name in others)]


def _draw_axes(drawing: Drawing, x: AxisScale, y: AxisScale, *, small: bool) -> None:
    """Draw the grid with its marks, and the names of both axes; marks that would overlap are left out."""
    marks = byte_ticks(x.high, 3 if small else 6)
    if x.log:
        marks = [(v, format_size(v)) for v in power_of_two_ticks(x.low, x.high, byte_unit_of(x.high))]
    free = 0.0
    for value, words in marks:
        drawing.line((x(value), y.start), (x(value), y.end), "grid")
        half = text_width(words) / 2
        start = x(value) - (half if value else 0)
        if start >= free and start + 2 * half <= drawing.width:
            drawing.text(x(value), y.start + 17, words, "tick", "middle" if value else "start")
            free = start + 2 * half + 6
    for value in round_ticks(y.low, y.high, 5):
        drawing.line((x.start, y(value)), (x.end, y(value)), "grid")
        drawing.text(48, y(value) + 4, f"{value:g}", "tick", "end")
    drawing.text(x.end, y.start + 36, f"memory at the peak{', logarithmic scale' if x.log else ''}", "tick", "end")
    drawing.text(x.start + 6, y.end + 4, "samples a second", "tick")


def pareto_front(places: dict[str, tuple[float, float]]) -> list[str]:
    """Return the strategies that no other beats in both memory and speed, smallest first."""
    best: list[str] = []
    for name in sorted(places, key=lambda n: (places[n][0], -places[n][1])):
        if not best or places[name][1] > places[best[-1]][1]:
            best.append(name)
    return best
