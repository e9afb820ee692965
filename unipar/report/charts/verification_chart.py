"""Figures of a verification: differences from one process as multiples of what is allowed, by strategy and by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unipar.report.charts.bars import NARROW_BELOW_PIXELS, OUTLIER_RATIO, BarRows, draw_gap
from unipar.report.charts.lines import LineSeries, draw_lines, step_ticks
from unipar.report.charts.svg import AxisScale, Drawing, line_class, round_ticks
from unipar.report.data.verification_data import StepQuantity, VerificationPageData
from unipar.results.verdicts import Verdict, format_share
from unipar.utils.text import first_few

_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -4, 6
"""Ends of the logarithmic scale of differences by step; what is beyond is drawn at the end."""


def draw_verdict_shares(page: VerificationPageData, width: int) -> str:
    """Draw each strategy's largest difference as a bar, and a line at the limit; a bar beyond the scale is cut."""
    strategies = page.judged_strategies
    shares = [_share_of(row) for row in strategies]
    end = max([1.0, *(s for s in shares if s <= OUTLIER_RATIO)]) * 1.15
    label = "Largest difference of each strategy, as a multiple of the allowed one"
    label += "".join(
        f"; the bar of {c.strategy} is cut short, it is {format_share(s)}"
        for c, s in zip(strategies, shares, strict=True)
        if s > end
    )
    rows = BarRows([row.strategy for row in strategies], width, 26, end, label, 64)
    rows.grid(
        [(0, "0"), *((v, f"{v:g}") for v in round_ticks(0, end, 4) if v > 0 and abs(v - 1) > 0.2), (1, "allowed")]
    )
    for i, (row, share) in enumerate(zip(strategies, shares, strict=True)):
        rows.draw_name(i)
        stop = rows.x(share)
        tip = f"{row.strategy}: {row.worst}"
        kind = "share beyond" if row.outcome == "disagrees" else "share"
        rows.drawing.rect(rows.x.start, rows.y(i) + 4, max(stop - rows.x.start, 1), 17, kind, tip)
        if share > end:
            draw_gap(rows, rows.y(i) + 4, 17, rows.x.end - 26)
        rows.drawing.text(stop + 7, rows.y(i) + 17, format_share(share), "value")
    rows.drawing.line((rows.x(1), rows.top), (rows.x(1), rows.bottom), "limit")
    return str(rows.drawing)


def _share_of(row: Verdict) -> float:
    """Return the strategy's largest share; one that is not a number is infinite."""
    return math.inf if row.share is None or math.isnan(row.share) else row.share


def draw_step_shares(page: VerificationPageData, quantity: StepQuantity, width: int) -> str:
    """Draw a line for each group of strategies with the same differences, by step, and a line at what is allowed."""
    groups = page.step_shares(quantity)
    values = [s for _, shares in groups for s in shares if s > 0 and math.isfinite(s)]
    low = max(math.floor(math.log10(min([0.1, *values]))), _LOWEST_EXPONENT)
    high = min(max(math.ceil(math.log10(max([1.0, *values]))), 1), _HIGHEST_EXPONENT)
    count = max(len(shares) for _, shares in groups)
    drawing = Drawing(width, 252, f"Difference of each {quantity} from one process, as a multiple of the allowed one")
    x = AxisScale(1, max(count, 2), 62, width - 10)
    y = AxisScale(10.0**low, 10.0**high, 192, 10, log=True)
    floor = 214.0
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        drawing.line((x.start, at), (x.end, at), "limit" if exponent == 0 else "grid")
        drawing.text(54, at + 4, "allowed" if exponent == 0 else f"{10.0**exponent:g}", "tick", "end")
    drawing.line((x.start, floor), (x.end, floor), "grid")
    drawing.text(54, floor + 4, "same", "tick", "end")
    for step in step_ticks(count, 5 if width < NARROW_BELOW_PIXELS else 12):
        drawing.text(x(step), 232, str(step), "tick", "middle")
    drawing.text(x.end, 249, "optimizer step", "tick", "end")
    for i, (rows, shares) in enumerate(groups):
        names = first_few([row.strategy for row in rows])
        points = [(x(step), y(share) if share > 0 else floor) for step, share in enumerate(shares, 1)]
        drawing.polyline(points, f"way {line_class(i)}", f"{names}: up to {format_share(max(shares))}")
        for at in points:
            drawing.dot(at, 2.6, f"at {line_class(i)}")
    return str(drawing)


def draw_verified_losses(page: VerificationPageData, width: int) -> str:
    """Draw the losses of one process as a thick line, and every strategy's on top of it."""
    series = [LineSeries("one process", "loss one", _numbered(page.verdicts.base_run.get("loss", [])))]
    series += [LineSeries(row.strategy, "loss", _numbered(row.losses)) for row in page.judged_strategies if row.losses]
    return draw_lines(series, width, "Loss by step")


def _numbered(values: Sequence[float]) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))
