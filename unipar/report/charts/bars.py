"""Figures with one row per strategy: memory by category, a bridge between two, balance of ranks, step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.backend import Category
from unipar.memory.account import CATEGORIES
from unipar.report.charts.svg import AxisScale, Drawing, byte_unit_of, fit_name, round_ticks, text_width
from unipar.report.data.comparison_data import ComparisonPageData, StrategyPageData
from unipar.report.data.headline import CATEGORY_LABELS, category_differences, step_time_quartiles
from unipar.utils.text import format_duration, format_size

NARROW_BELOW_PIXELS = 500
"""Width below which a name is above its row instead of left of the row."""

OUTLIER_RATIO = 2.5
"""Ratio to the next smaller bar above which a bar is cut, so that all others stay readable."""


class BarRows:
    """Frame of a figure: rows with names at the left (above them if narrow), values at the right, a scale between."""

    def __init__(self, names: Sequence[str], width: int, height: float, high: float, label: str, room: float) -> None:
        self.small = width < NARROW_BELOW_PIXELS
        left = 0.0 if self.small else max((text_width(n) for n in names), default=0) + 14
        self.step = height + (18 if self.small else 0)
        self.top = 4.0
        bottom = self.top + self.step * len(names)
        self.drawing = Drawing(width, bottom + 24, label)
        self.x = AxisScale(0, high or 1.0, left, width - room)
        self.bottom, self._names = bottom, names

    def y(self, i: int) -> float:
        """Return the top of row `i`, below its name if the figure is narrow."""
        return self.top + self.step * i + (18 if self.small else 0)

    def draw_name(self, i: int) -> None:
        """Draw the name of row `i`."""
        y = self.y(i)
        if self.small:
            self.drawing.text(0, y - 5, fit_name(self._names[i], self.drawing.width), "name")
        else:
            self.drawing.text(self.x.start - 12, y + 18, self._names[i], "name", "end")

    def grid(self, at: Sequence[tuple[float, str]]) -> None:
        """Draw grid lines at these values; words that would overlap are left out."""
        free = 0.0
        for value, words in at:
            x, half = self.x(value), text_width(words) / 2
            start = max(x - half, 0)
            self.drawing.line((x, self.top), (x, self.bottom), "grid")
            if start >= free and start + 2 * half <= self.drawing.width:
                self.drawing.text(start + half, self.bottom + 16, words, "tick", "middle")
                free = start + 2 * half + 12


def byte_ticks(high: float, about: int = 5) -> list[tuple[float, str]]:
    """Return round numbers of bytes up to `high`, each with its text."""
    unit = byte_unit_of(high)
    return [(v, format_size(v) if v else "0") for v in round_ticks(0, high, about, unit)]


def choose_bar_scale(page: ComparisonPageData, before: ComparisonPageData | None) -> tuple[float, list[str]]:
    """Return the largest value of the memory scale, and the few strategies beyond it, whose bars are cut."""
    old = {c.strategy: c.peak for c in (before.measured_strategies if before is not None else [])}
    return bar_scale({c.strategy: max(c.peak, old.get(c.strategy, 0)) for c in page.measured_strategies})


def bar_scale(sizes: Mapping[str, int]) -> tuple[float, list[str]]:
    """Return the largest value of a scale of bars by name, and the few names whose bars are cut."""
    names = sorted(sizes, key=lambda name: sizes[name])
    for n in range(len(names) // 3, 0, -1):
        if sizes[names[-n]] > OUTLIER_RATIO * sizes[names[-n - 1]]:
            return sizes[names[-n - 1]] * 1.3, names[-n:]
    return sizes[names[-1]], []


def draw_memory_bars(page: ComparisonPageData, before: ComparisonPageData | None, width: int) -> str:
    """Draw each strategy's peak by category, smallest first; with `before`, an earlier one's as a thin bar below."""
    strategies = page.measured_strategies
    old = {c.strategy: c for c in (before.measured_strategies if before is not None else [])}
    high, cut = choose_bar_scale(page, before)
    names = [f"{c.strategy} †" if c.is_library_default else c.strategy for c in strategies]
    label = _label_with_cuts("Memory at the peak, by category", strategies, cut)
    rows = BarRows(names, width, 38 if old else 30, high, label, 84)
    rows.grid(byte_ticks(high, 3 if rows.small else 5))
    for i, strategy in enumerate(strategies):
        rows.draw_name(i)
        end = draw_stacked_bar(rows, _held_at_peak(strategy), rows.y(i) + 4, 20, strategy.strategy)
        rows.drawing.text(end + 7, rows.y(i) + 18, format_size(strategy.peak), "value")
        if (was := old.get(strategy.strategy)) is not None:
            end = draw_stacked_bar(rows, _held_at_peak(was), rows.y(i) + 26, 5, f"before, {was.strategy}")
            rows.drawing.text(end + 7, rows.y(i) + 33, format_size(was.peak), "faint")
    return str(rows.drawing)


def _held_at_peak(strategy: StrategyPageData) -> Mapping[Category, int]:
    assert strategy.fullest_account is not None
    return strategy.fullest_account.peak.held


def draw_stacked_bar(rows: BarRows, held: Mapping[Category, int], y: float, height: float, whose: str) -> float:
    """Draw one stacked bar and return its end; a bar beyond the scale is drawn with a gap before its end."""
    total = 0
    for category in CATEGORIES:
        if part := held.get(category, 0):
            start, end = rows.x(total), rows.x(total + part)
            total += part
            if start < rows.x.end:
                tip = f"{whose}, {CATEGORY_LABELS[category]}: {format_size(part)}"
                rows.drawing.rect(start, y, max(end - start - 1, 0.6), height, f"c-{category}", tip)
    if total > rows.x.high:
        draw_gap(rows, y, height, rows.x.end - 26)
    return rows.x(total)


def draw_gap(rows: BarRows, y: float, height: float, start: float) -> None:
    """Draw two slanted stripes over what is cut."""
    for at in (start, start + 8):
        corners = [(at, y + height + 2), (at + 8, y - 2), (at + 12, y - 2), (at + 4, y + height + 2)]
        rows.drawing.polygon(corners, "break")


def _label_with_cuts(label: str, strategies: Sequence[StrategyPageData], cut: Sequence[str]) -> str:
    """Return the label of a figure, with the true size of each bar that is cut."""
    return label + "".join(
        f"; the bar of {c.strategy} is cut short, it is {format_size(c.peak)}" for c in strategies if c.strategy in cut
    )


def draw_bridge(one: StrategyPageData, two: StrategyPageData, width: int) -> str:
    """Draw the steps from one cell's peak to another's: a row per category, starting where the previous one ended."""
    moved = category_differences(one, two)
    least = 0.004 * max(one.peak, two.peak)
    shown: list[tuple[Category | None, int]] = [(c, d) for c, d in moved.items() if abs(d) >= least]
    rest = sum(moved.values()) - sum(d for _, d in shown)
    shown += [(None, rest)] if rest else []
    names = [one.strategy, *(CATEGORY_LABELS[c] if c else "all others" for c, _ in shown), two.strategy]
    total, highest = one.peak, one.peak
    for _, delta in shown:
        total += delta
        highest = max(highest, total)
    rows = BarRows(names, width, 26, highest, f"What moved from {one.strategy} to {two.strategy}", 92)
    draw = rows.drawing
    rows.grid(byte_ticks(highest, 3 if rows.small else 5))
    rows.draw_name(0)
    draw.rect(rows.x.start, rows.y(0) + 4, rows.x(one.peak) - rows.x.start, 17, "whole")
    draw.text(draw.width, rows.y(0) + 17, format_size(one.peak), "value", "end")
    total = one.peak
    for i, (category, delta) in enumerate(shown, 1):
        rows.draw_name(i)
        low, high = sorted((total, total + delta))
        tip = f"{names[i]}: {_signed(delta)}"
        draw.rect(rows.x(low), rows.y(i) + 4, max(rows.x(high) - rows.x(low), 1), 17, f"c-{category or 'runtime'}", tip)
        edge = rows.x(total)
        draw.line((edge, rows.y(i) - rows.step + 21), (edge, rows.y(i) + 4), "link")
        draw.text(draw.width, rows.y(i) + 17, _signed(delta), "value less" if delta < 0 else "value more", "end")
        total += delta
    last = len(names) - 1
    rows.draw_name(last)
    draw.rect(rows.x.start, rows.y(last) + 4, rows.x(two.peak) - rows.x.start, 17, "whole")
    draw.text(draw.width, rows.y(last) + 17, format_size(two.peak), "value", "end")
    return str(draw)


def _signed(delta: int) -> str:
    return f"{'−' if delta < 0 else '+'}{format_size(abs(delta))}"


def draw_rank_balance(page: ComparisonPageData, width: int) -> str:
    """Draw each rank's peak as a dot, and how much the largest exceeds the smallest; a row beyond the scale is cut."""
    strategies = page.measured_strategies
    high, cut = choose_bar_scale(page, None)
    rows = BarRows(
        [c.strategy for c in strategies], width, 26, high, _label_with_cuts("Each rank's peak", strategies, cut), 70
    )
    rows.grid(byte_ticks(high, 3 if rows.small else 5))
    for i, strategy in enumerate(strategies):
        rows.draw_name(i)
        peaks = [(a.rank, a.peak.peak) for a in strategy.memory]
        y = rows.y(i) + 13
        least, most = min(p for _, p in peaks), max(p for _, p in peaks)
        beyond = max(most - rows.x.high, 0)  # the fullest rank is at the end, the others as far from it as they are
        if strategy.strategy in cut:
            rows.drawing.line((rows.x.start, y), (rows.x(least - beyond), y), "cut")
            draw_gap(rows, y - 7, 14, rows.x(least - beyond) - 34)
        rows.drawing.line((rows.x(least - beyond), y), (rows.x(most - beyond), y), "span")
        for rank, peak in peaks:
            rows.drawing.dot(
                (rows.x(peak - beyond), y), 4.5, "dot", f"{strategy.strategy}, rank {rank}: {format_size(peak)}"
            )
        over = f"+{100 * (most / least - 1):.1f} %" if len(peaks) > 1 and least else "one rank"
        rows.drawing.text(width, y + 4, over, "value", "end")
    return str(rows.drawing)


def draw_step_times(page: ComparisonPageData, before: ComparisonPageData | None, width: int) -> str:
    """Draw every step as a dot, the middle half as a bar, the median as a line; fastest strategy first."""
    strategies = page.timed_strategies
    old = {c.strategy: c for c in (before.timed_strategies if before is not None else [])}
    high = max(max(c.timed) for c in strategies)
    high = max([high, *(step_time_quartiles(old[c.strategy])[1] for c in strategies if c.strategy in old)])
    rows = BarRows([c.strategy for c in strategies], width, 28, high, "Seconds a step", 70)
    rows.grid([(v, format_duration(v) if v else "0") for v in round_ticks(0, high, 3 if rows.small else 5)])
    for i, strategy in enumerate(strategies):
        rows.draw_name(i)
        y, (low, top) = rows.y(i) + 14, step_time_quartiles(strategy)
        if (was := old.get(strategy.strategy)) is not None:
            start, end = step_time_quartiles(was)
            tip = f"before: {format_duration(was.median_seconds)}"
            rows.drawing.rect(rows.x(start), y + 9, max(rows.x(end) - rows.x(start), 2), 3, "was", tip)
        half = f"{format_duration(low)} to {format_duration(top)}"
        tip = f"{strategy.strategy}: median {format_duration(strategy.median_seconds)}, middle half {half}"
        rows.drawing.rect(rows.x(low), y - 7, max(rows.x(top) - rows.x(low), 1), 14, "half", tip)
        for seconds in strategy.timed:
            rows.drawing.dot((rows.x(seconds), y), 2.2, "step")
        rows.drawing.line((rows.x(strategy.median_seconds), y - 9), (rows.x(strategy.median_seconds), y + 9), "median")
        rows.drawing.text(width, y + 4, format_duration(strategy.median_seconds), "value", "end")
    return str(rows.drawing)
