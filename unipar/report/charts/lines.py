"""Figures of curves: memory through a step, losses and their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from unipar.memory.account import MemoryAccount
from unipar.report.charts.bars import NARROW_BELOW_PIXELS, byte_ticks
from unipar.report.charts.svg import AxisScale, Drawing, fit_name, round_ticks, text_width
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.results.loss_agreement import loss_tolerance
from unipar.utils.text import format_size

MAX_CURVE_POINTS = 240
"""Largest number of points of a drawn curve."""

OWN_SCALE_RATIO = 3
"""Ratio to the median curve's height above which a curve gets a scale of its own."""

SHADE_BOUNDS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
"""Bounds between the shades of a difference; 0 and differences below the first bound have shades of their own."""


def strategies_with_curves(strategies: Sequence[StrategyPageData]) -> list[tuple[StrategyPageData, MemoryAccount]]:
    """Return the strategies with a curve of memory over a step, each with the account of its fullest rank."""
    return [(c, c.fullest_account) for c in strategies if c.fullest_account is not None and c.fullest_account.curve]


@dataclass(frozen=True)
class StepPanel:
    """Memory along one step, drawn as one panel; `before`: an earlier account, drawn dashed."""

    name: str
    account: MemoryAccount
    before: MemoryAccount | None = None

    @property
    def top(self) -> int:
        """Highest number of bytes of both."""
        return max(b for account in (self.account, self.before) if account is not None for _, b in account.curve)


def draw_memory_through_step(page: ComparisonPageData, before: ComparisonPageData | None, width: int) -> str:
    """Draw one panel per strategy: bytes along one step of its fullest rank, on a common scale except for outliers."""
    old = {c.strategy: a for c, a in strategies_with_curves(before.measured_strategies if before is not None else [])}
    panels = [
        StepPanel(c.strategy, a, old.get(c.strategy)) for c, a in strategies_with_curves(page.measured_strategies)
    ]
    return draw_step_panels(panels, width)


def draw_step_panels(panels: Sequence[StepPanel], width: int, *, across: int = 3, high: int = 128) -> str:
    """Draw panels of this height, `across` of them in a row on a wide screen, on a common scale but for outliers."""
    across = 1 if width < NARROW_BELOW_PIXELS else across
    gap, left = 18, 62
    each = (width - left - gap * (across - 1)) / across
    drawing = Drawing(width, math.ceil(len(panels) / across) * (high + 46) + 4, "Memory along one step")
    tops = [panel.top for panel in panels]
    common = max(top for top in tops if top <= OWN_SCALE_RATIO * median(tops))
    for i, panel in enumerate(panels):
        column, row = i % across, i // across
        own_scale = panel.top > common
        x = AxisScale(0, 1, left + column * (each + gap), left + column * (each + gap) + each)
        y = AxisScale(0, panel.top if own_scale else common, row * (high + 46) + 34 + high, row * (high + 46) + 34)
        drawing.text(x.start, y.end - 20, fit_name(panel.name, each), "name")
        _draw_phases(drawing, panel.account, x, y)
        for value, words in [] if own_scale else byte_ticks(y.high, 3):
            drawing.line((x.start, y(value)), (x.end, y(value)), "grid")
            if column == 0:
                drawing.text(left - 6, y(value) + 4, words, "tick", "end")
        if panel.before is not None:
            drawing.polyline([(x(a), y(b)) for a, b in thin_curve(panel.before.curve)], "curve before")
        points = [(x(a), y(b)) for a, b in thin_curve(panel.account.curve)]
        drawing.polygon([(points[0][0], y.start), *points, (points[-1][0], y.start)], "under")
        drawing.polyline(points, "curve", f"{panel.name}: {format_size(panel.account.peak.peak)} at the peak")
        if own_scale:
            drawing.text(x.start + 6, y.start - 8, f"a scale of its own, up to {format_size(y.high)}", "tick")
    return str(drawing)


def _draw_phases(drawing: Drawing, account: MemoryAccount, x: AxisScale, y: AxisScale) -> None:
    for j, (at, phase) in enumerate(account.marks):
        end = account.marks[j + 1][0] if j + 1 < len(account.marks) else 1.0
        if j % 2:
            drawing.rect(x(at), y.end, x(end) - x(at), y.start - y.end, "phase")
        if x(end) - x(at) >= text_width(phase) - 4:
            drawing.text((x(at) + x(end)) / 2, y.end - 4, phase, "tick", "middle")


def thin_curve(curve: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most MAX_CURVE_POINTS points: the highest of each interval, and the last one."""
    if len(curve) <= MAX_CURVE_POINTS:
        return list(curve)
    highest: dict[int, tuple[float, int]] = {}
    for at, size in curve:
        interval = min(int(at * (MAX_CURVE_POINTS - 1)), MAX_CURVE_POINTS - 2)
        if interval not in highest or size > highest[interval][1]:
            highest[interval] = (at, size)
    return [*(highest[interval] for interval in sorted(highest)), curve[-1]]


@dataclass(frozen=True)
class LineSeries:
    """Values by step, drawn as one line."""

    tip: str
    kind: str
    points: Sequence[tuple[int, float]]


def draw_losses(page: ComparisonPageData, width: int) -> str:
    """Draw the losses of one process as a thick line, and every strategy's on top of it."""
    one = page.comparison.reference
    rows = [c.row for c in page.strategies if c.row.outcome == "ran" and c.row.losses]
    series = [
        LineSeries(row.strategy, "loss one" if row is one else "loss", list(enumerate(row.losses, 1))) for row in rows
    ]
    return draw_lines(series, width, "Loss by step")


@dataclass(frozen=True)
class StepMark:
    """Step at which something changed, drawn as a vertical line with its name."""

    step: int
    name: str


def draw_lines(
    series: Sequence[LineSeries],
    width: int,
    label: str,
    *,
    marks: Sequence[StepMark] = (),
    ticks: Sequence[int] = (),
) -> str:
    """Draw all series in one figure; values that are not finite are left out. `ticks`: steps marked on the axis."""
    series = [LineSeries(s.tip, s.kind, [(i, v) for i, v in s.points if math.isfinite(v)]) for s in series]
    values = [v for s in series for _, v in s.points] or [0.0]
    count = max((i for s in series for i, _ in s.points), default=1)
    small = width < NARROW_BELOW_PIXELS
    drawing = Drawing(width, 226, label)
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 0.5
    x, y = AxisScale(1, max(count, 2), 56, width - 10), AxisScale(low - room, high + room, 190, 10)
    for value in round_ticks(y.low, y.high, 4):
        drawing.line((x.start, y(value)), (x.end, y(value)), "grid")
        drawing.text(48, y(value) + 4, f"{value:.4g}", "tick", "end")
    for step in step_ticks(count, 5 if small else 12):
        drawing.text(x(step), 208, str(step), "tick", "middle")
    drawing.text(x.end, 224, "optimizer step", "tick", "end")
    for step in ticks:
        drawing.line((x(step), y.start), (x(step), y.start - 7), "saved")
    _draw_marks(drawing, marks, x, y)
    for s in series:
        tip = f"{s.tip}: {s.points[0][1]:.4f} to {s.points[-1][1]:.4f}" if s.points else s.tip
        drawing.polyline([(x(i), y(v)) for i, v in s.points], s.kind, tip)
    return str(drawing)


def _draw_marks(drawing: Drawing, marks: Sequence[StepMark], x: AxisScale, y: AxisScale) -> None:
    """Draw a vertical line at each mark, with its name on the side that has more room, one row a mark."""
    for i, mark in enumerate(marks):
        at, row = x(max(mark.step, 1)), y.end + 10 + 15 * (i % 6)
        drawing.line((at, y.start), (at, y.end), "attempt")
        left = at - x.start > x.end - at
        name = fit_name(mark.name, max(at - x.start, x.end - at) - 10)
        drawing.text(at - 5 if left else at + 5, row, name, "tick label", "end" if left else "start")


def step_ticks(count: int, about: int) -> list[int]:
    """Return round numbers of steps from 1 to `count`."""
    return sorted({1, *(int(v) for v in round_ticks(1, count, about) if v >= 1 and v == int(v))})


def loss_differences(page: ComparisonPageData) -> list[tuple[str, list[float]]]:
    """Return name and differences from one process by step, per strategy or part; relative to losses above 1."""
    one = page.comparison.reference
    if one is None:
        return []
    series: list[tuple[str, list[float]]] = []
    for strategy in page.strategies:
        if strategy.row is one or strategy.row.outcome != "ran":
            continue
        parts = [(f"{strategy.strategy}, {p}", v, one.parts.get(p, [])) for p, v in strategy.row.parts.items()]
        for name, mine, theirs in parts or [(strategy.strategy, strategy.row.losses, one.losses)]:
            series.append((name, [abs(a - b) / max(1.0, abs(b)) for a, b in zip(mine, theirs, strict=False)]))
    return series


def shade_of(off: float) -> int:
    """Return the shade of a difference: 0 if there is none, then darker with each power of ten."""
    return 0 if off == 0 else 1 + sum(off >= bound for bound in SHADE_BOUNDS)


def draw_loss_differences(page: ComparisonPageData, width: int) -> str:
    """Draw a row per strategy and a square per step, darker with the difference; a cross marks one not allowed."""
    series = loss_differences(page)
    small = width < NARROW_BELOW_PIXELS
    left = 0.0 if small else max(text_width(name) for name, _ in series) + 14
    count = max(len(values) for _, values in series)
    bins = min(count, 40 if small else 100)
    each, step = (width - left) / bins, 40 if small else 24
    drawing = Drawing(width, step * len(series) + 34, "Difference of each loss from one process, by step")
    allowed = loss_tolerance(page.comparison.judged_as)
    for i, (name, values) in enumerate(series):
        y = step * i + (18 if small else 0)
        if small:
            drawing.text(0, y - 5, fit_name(name, width), "name")
        else:
            drawing.text(left - 12, y + 15, name, "name", "end")
        for j in range(bins):
            first, last = j * count // bins, max((j + 1) * count // bins, j * count // bins + 1)
            if not values[first:last]:
                continue
            off = max(values[first:last])
            size = f"{off:.1e}" if off else "identical"
            where = f"step {first + 1}" if last == first + 1 else f"steps {first + 1} to {last}"
            x = left + each * j
            drawing.rect(x, y + 1, each - 1, 19, f"s{shade_of(off)}", f"{name}, {where}: {size}")
            if off > allowed:
                drawing.line((x + 2, y + 4), (x + each - 3, y + 17), "cross")
                drawing.line((x + 2, y + 17), (x + each - 3, y + 4), "cross")
    bottom = step * len(series)
    for at in step_ticks(count, 5 if small else 12):
        where = left + each * ((at - 1) * bins // count + 0.5)
        drawing.text(max(where, left + 4), bottom + 14, str(at), "tick", "middle")
    drawing.text(width, bottom + 30, "optimizer step", "tick", "end")
    return str(drawing)
