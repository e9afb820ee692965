"""Boxes and lines of a figure, in pixels: how far apart they are, whether they touch or cross."""

from __future__ import annotations

import math
from typing import NamedTuple

from unipar.report.charts.svg import Point


class LabelBox(NamedTuple):
    """Rectangle around a text, in pixels; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: LabelBox) -> bool:
        """Return whether the rectangles share more than an edge."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def distance_to(self, point: Point) -> float:
        """Return the distance of a point from the rectangle, 0 inside."""
        x, y = point
        return math.hypot(max(self.left - x, 0, x - self.right), max(self.top - y, 0, y - self.bottom))


class LineSegment(NamedTuple):
    """Straight line between two points of the figure."""

    start: Point
    end: Point


def distance_to_line(point: Point, line: LineSegment) -> float:
    """Return the distance of a point from a line."""
    (x1, y1), (x2, y2) = line
    dx, dy = x2 - x1, y2 - y1
    length = dx * dx + dy * dy
    along = min(max(((point[0] - x1) * dx + (point[1] - y1) * dy) / length, 0.0), 1.0) if length else 0.0
    return math.hypot(point[0] - x1 - along * dx, point[1] - y1 - along * dy)


def touches_box(line: LineSegment, box: LabelBox) -> bool:
    """Return whether any part of a line is in a box: the line is cut at each edge, and something is left."""
    (x1, y1), (x2, y2) = line
    first, last = 0.0, 1.0
    for start, step, low, high in ((x1, x2 - x1, box.left, box.right), (y1, y2 - y1, box.top, box.bottom)):
        if step == 0:
            if not low < start < high:
                return False
            continue
        enters, leaves = sorted(((low - start) / step, (high - start) / step))
        first, last = max(first, enters), min(last, leaves)
    return first < last


def lines_cross(one: LineSegment, other: LineSegment) -> bool:
    """Return whether two lines have a point in common."""

    def side(line: LineSegment, point: Point) -> float:
        (x1, y1), (x2, y2) = line
        return (x2 - x1) * (point[1] - y1) - (y2 - y1) * (point[0] - x1)

    a, b = side(one, other.start), side(one, other.end)
    c, d = side(other, one.start), side(other, one.end)
    if a == b == 0:
        return LabelBox(*_bounds(one)).overlaps(LabelBox(*_bounds(other)))
    return a * b <= 0 and c * d <= 0


def lengthen(line: LineSegment) -> LineSegment:
    """Return a line a pixel longer at each end, so that two of them that do not cross do not touch either."""
    (x1, y1), (x2, y2) = line
    far = math.dist(*line)
    dx, dy = (x2 - x1) / far, (y2 - y1) / far
    return LineSegment((x1 - dx, y1 - dy), (x2 + dx, y2 + dy))


def _bounds(line: LineSegment) -> tuple[float, float, float, float]:
    """Return the rectangle around a line, a little wider than the line."""
    (x1, y1), (x2, y2) = line
    return min(x1, x2) - 0.01, min(y1, y2) - 0.01, max(x1, x2) + 0.01, max(y1, y2) + 0.01
