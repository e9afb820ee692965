"""SVG drawings, shape by shape, and their scales. Colours are classes of page.css."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

LETTER_WIDTH = 7.2
"""Approximate largest width of a letter in pixels, at the text size of drawings; fonts differ."""

COLOUR_COUNT = 6
"""Number of line colours; further lines use them again, dashed."""

TextAnchor = Literal["start", "middle", "end"]
Point = tuple[float, float]


def text_width(words: str) -> float:
    """Return the approximate largest width of a text, in pixels."""
    return LETTER_WIDTH * len(words)


_SHORT_AXES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "sequence": "sp", "expert": "ep"}


def fit_name(name: str, width: float) -> str:
    """Return a strategy's name in at most this many pixels: with short names of axes (`tp2` for `tensor2`), or cut."""
    if text_width(name) <= width:
        return name
    first, *words = name.split("+")
    short = [re.sub(r"^[a-z]+", lambda axis: _SHORT_AXES.get(axis[0], axis[0]), word) for word in words]
    name = "+".join((first, *short))
    most = int(width / LETTER_WIDTH)
    return name if len(name) <= most else f"{name[: max(most - 1, 1)]}…"


class Drawing:
    """SVG figure; `label` is its text for screen readers."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: TextAnchor = "start") -> None:
        """Add a text at a position."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}"{_class_attribute(kind)}{_anchor_attribute(anchor)}>'
            f"{html.escape(words)}</text>"
        )

    def rect(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        """Add a rectangle; `tip` is shown by a pointer over it."""
        where = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
        self._shapes.append(_with_tip("rect", where + _class_attribute(kind), tip))

    def line(self, start: Point, end: Point, kind: str) -> None:
        """Add a straight line."""
        (x1, y1), (x2, y2) = start, end
        self._shapes.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{_class_attribute(kind)}/>')

    def dot(self, at: Point, radius: float, kind: str, tip: str = "") -> None:
        """Add a circle; `tip` is shown by a pointer over it."""
        where = f'cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}"'
        self._shapes.append(_with_tip("circle", where + _class_attribute(kind), tip))

    def polyline(self, points: Sequence[Point], kind: str, tip: str = "") -> None:
        """Draw a line through all points; a single point becomes a dot."""
        if len(points) == 1:
            self.dot(points[0], 2, kind, tip)
        elif points:
            where = f'points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'
            self._shapes.append(_with_tip("polyline", where + _class_attribute(kind), tip))

    def polygon(self, points: Sequence[Point], kind: str) -> None:
        """Add a filled shape."""
        self._shapes.append(
            f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"{_class_attribute(kind)}/>'
        )

    @override
    def __str__(self) -> str:
        head = f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{html.escape(self.label)}"'
        return "\n".join([f"{head}>", *self._shapes, "</svg>"])


def _class_attribute(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _anchor_attribute(anchor: TextAnchor) -> str:
    return "" if anchor == "start" else f' text-anchor="{anchor}"'


def _with_tip(shape: str, attributes: str, tip: str) -> str:
    return f"<{shape} {attributes}><title>{html.escape(tip)}</title></{shape}>" if tip else f"<{shape} {attributes}/>"


@dataclass(frozen=True)
class AxisScale:
    """Scale from the values of an axis to pixels; linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1.0)


def round_ticks(low: float, high: float, about: int = 5, unit: float = 1.0) -> list[float]:
    """Return round values between `low` and `high`: steps of 1, 2 or 5, times a power of ten, times `unit`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(about, 1) / unit
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if s >= rough * 0.999) * unit
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_class(i: int) -> str:
    """Return the class of the line of number `i`."""
    return f"w{i % COLOUR_COUNT}" + (" again" if i >= COLOUR_COUNT else "")


def power_of_two_ticks(low: float, high: float, unit: float) -> list[float]:
    """Return ticks of a logarithmic scale: powers of two times `unit`."""
    first, last = math.ceil(math.log2(low / unit) - 1e-9), math.floor(math.log2(high / unit) + 1e-9)
    return [unit * 2.0**i for i in range(first, last + 1)]


def byte_unit_of(size: float) -> float:
    """Return the power of 1024 in which a number of bytes is shown."""
    return next((float(u) for u in (2**30, 2**20, 2**10) if size >= 0.98 * u), 1.0)
