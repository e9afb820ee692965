"""Labels of points, beside them or in a column: none touches a label, a point or a leader, and no leaders cross."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations, islice

from unipar.report.charts.geometry import LabelBox, LineSegment, distance_to_line, lengthen, lines_cross, touches_box
from unipar.report.charts.svg import Point, TextAnchor, text_width

POINT_RADIUS = 6.5
"""Radius of a drawn point with its edge, in pixels, which labels and leaders of others stay out of."""

COLUMN_LINE = 15.0
"""Height of a line in a column of labels, in pixels."""

_ASCENT, _DESCENT, _MARGIN = 10.0, 4.0, 2.0
"""Extent of a text above and below its baseline, and free space around its box."""

_NEAR_ENOUGH = 14.0
"""Smallest distance of a label without leader to another point, so that it is clear whose label it is."""

_SAME_PLACE = 2.0
"""Distance below which two points are drawn as one, so that either may have a label beside it."""

_LEADER_COST, _CROSSED_LINE_COST, _COVERED_LINE_COST, _TOUCHED_POINT_COST = 16.0, 40.0, 140.0, 150.0
"""Costs in pixels of leader: of having one, of crossing a line of the figure, of a label on it, of touching a point."""

_MOST_MISSING = 2
"""Number of labels without a place up to which others are moved, and placed in other orders."""

_PUSHING_CANDIDATES = 12
"""Number of places of a label for which others are moved."""

_LEADER_LENGTHS = (12, 18, 25, 33, 42, 53, 66, 82, 100, 122, 148)
_DIRECTIONS = tuple((math.cos(math.pi * i / 20), math.sin(math.pi * i / 20)) for i in range(40))


@dataclass(frozen=True)
class PlacedLabel:
    """Text beside its point, or at the end of a leader."""

    text: Point
    """Place of the text: its baseline, at the end that `anchor` names."""

    anchor: TextAnchor
    box: LabelBox
    leader: LineSegment | None
    cost: float = 0.0


def place_labels(
    points: Mapping[str, Point],
    words: Mapping[str, str],
    area: LabelBox,
    others: Sequence[Point] = (),
    lines: Sequence[LineSegment] = (),
) -> dict[str, PlacedLabel] | None:
    """Return each point's label within `area`, as near as possible; None if there is no room for all.

    Labels and leaders stay clear of `points` and `others`, and of `lines` wherever that does not lead too far away.
    """
    plan = _LabelPlan(points, words, area, others, lines)
    orders = [
        sorted(points, key=lambda name: -sum(math.dist(points[name], at) < 60 for at in points.values())),
        sorted(points, key=lambda name: (points[name][1], points[name][0])),
        sorted(points, key=lambda name: (-points[name][0], points[name][1])),
    ]
    best: dict[str, PlacedLabel] = {}
    lowest = math.inf
    for order in orders:
        placed = plan.place_in(order)
        if len(placed) == len(points) and _sum_of_costs(placed) < lowest:
            best, lowest = placed, _sum_of_costs(placed)
        if lowest < _LEADER_COST or len(placed) < len(points) - _MOST_MISSING:
            break  # all are beside their points, or it is too crowded
    return {name: best[name] for name in points} if best else None


def place_in_column(
    points: Mapping[str, Point], words: Mapping[str, str], left: float, top: float, bottom: float
) -> dict[str, PlacedLabel]:
    """Return each point's label in a column that begins at `left`, right of all points, with a leader to each.

    There is room for as many labels as lines of `COLUMN_LINE` pixels; then no leaders cross, wherever the points are.
    """
    count = max(int((bottom - top) / COLUMN_LINE), len(points))
    slots = [(left, top + (bottom - top) * (i + 0.5) / count) for i in range(count)]
    column = _LabelColumn(points, slots)
    return {
        name: replace(
            _label((left + 3, slots[i][1]), "start", text_width(words[name]), None, 0), leader=column.leader(name, i)
        )
        for name, i in column.assign().items()
    }


class _LabelColumn:
    """Places of a column, and the leaders to them from the points."""

    def __init__(self, points: Mapping[str, Point], slots: Sequence[Point]) -> None:
        self._points, self._slots = points, slots
        self._costs = {name: [self._cost(name, slot) for slot in range(len(slots))] for name in points}

    def leader(self, name: str, slot: int) -> LineSegment:
        """Return the line from the edge of a point to a place."""
        (x, y), end = self._points[name], self._slots[slot]
        far = math.dist((x, y), end)
        return LineSegment((x + (end[0] - x) * POINT_RADIUS / far, y + (end[1] - y) * POINT_RADIUS / far), end)

    def assign(self) -> dict[str, int]:
        """Return a place for each point: near it, clear of other points where that is possible, without crossings."""
        slot_of = self._uncross(self._nearest_in_order())
        names = list(slot_of)
        for _ in range(4):
            before = dict(slot_of)
            for name in names:
                self._move_to_best(slot_of, name)
            if slot_of == before:
                break
        return slot_of

    def _nearest_in_order(self) -> dict[str, int]:
        """Return places in the order of the points from top to bottom, each as near as the others allow."""
        names = sorted(self._points, key=lambda name: (self._points[name][1], -self._points[name][0]))
        slot_of: dict[str, int] = {}
        for i, name in enumerate(names):
            first, last = max(slot_of.values(), default=-1) + 1, len(self._slots) - (len(names) - i)
            y = self._points[name][1]
            slot_of[name] = min(range(first, last + 1), key=lambda slot: abs(self._slots[slot][1] - y))
        return slot_of

    def _move_to_best(self, offsets: dict[str, int], name: str) -> None:
        """Move a label to the place, free or another's in exchange, that makes the sum of costs smallest."""
        holders = {slot: other for other, slot in offsets.items()}
        mine = offsets[name]
        best, gain = mine, -1e-6
        for slot in range(len(self._slots)):
            other = holders.get(slot)
            moved = {name: slot} if other is None else {name: slot, other: mine}
            cost = sum(self._costs[each][at] - self._costs[each][offsets[each]] for each, at in moved.items())
            if slot != mine and cost < gain and not self._crosses(offsets | moved, moved):
                best, gain = slot, cost
        if (other := holders.get(best)) is not None:
            offsets[other] = mine
        offsets[name] = best

    def _cost(self, name: str, slot: int) -> float:
        """Return the length of a leader, and the cost of the points that it touches."""
        leader, own = self.leader(name, slot), self._points[name]
        others = [at for other, at in self._points.items() if other != name]
        touched = sum(distance_to_line(at, leader) < min(POINT_RADIUS, math.dist(at, own) / 2) for at in others)
        return math.dist(*leader) + touched * _TOUCHED_POINT_COST

    def _crosses(self, offsets: Mapping[str, int], moved: Mapping[str, int]) -> bool:
        """Return whether the leader of any of the `moved` labels crosses another."""
        return any(
            self._cross(name, slot, other, at)
            for name, slot in moved.items()
            for other, at in offsets.items()
            if other != name
        )

    def _cross(self, name: str, slot: int, other: str, at: int) -> bool:
        """Return whether the lines from the middle of two points cross; of equal points they do not."""
        one, two = self._points[name], self._points[other]
        return one != two and lines_cross(LineSegment(one, self._slots[slot]), LineSegment(two, self._slots[at]))

    def _uncross(self, offsets: dict[str, int]) -> dict[str, int]:
        """Exchange the places of two labels whose leaders cross until none do; each time the sum of lengths falls."""
        crossing = True
        while crossing:
            crossing = False
            for one, other in combinations(offsets, 2):
                if self._cross(one, offsets[one], other, offsets[other]):
                    offsets[one], offsets[other] = offsets[other], offsets[one]
                    crossing = True
        return offsets


class _LabelPlan:
    """Candidates of every label, and what they must stay clear of."""

    def __init__(
        self,
        points: Mapping[str, Point],
        words: Mapping[str, str],
        area: LabelBox,
        others: Sequence[Point],
        lines: Sequence[LineSegment],
    ) -> None:
        self._points, self._words, self._area, self._lines = points, words, area, lines
        self._all = [*points.values(), *others]
        self._known: dict[str, list[PlacedLabel]] = {name: [] for name in points}
        self._further = {name: self._free_candidates(name) for name in points}

    def place_in(self, order: Sequence[str]) -> dict[str, PlacedLabel]:
        """Place the labels one after another at their cheapest free candidates, then each again while others stay."""
        placed: dict[str, PlacedLabel] = {}
        for _ in range(3):
            before = dict(placed)
            for name in order:
                now = placed.pop(name, None)
                best = self._cheapest(name, list(placed.values()), math.inf if now is None else now.cost) or now
                if best is not None:
                    placed[name] = best
            if placed == before or len(placed) < len(order) - _MOST_MISSING:
                break
        if len(placed) >= len(self._points) - _MOST_MISSING:
            for name in order:
                placed = self._push_aside(placed, name)
        return placed

    def _push_aside(self, placed: dict[str, PlacedLabel], name: str) -> dict[str, PlacedLabel]:
        """Return the labels with this one nearer to its point, if others can make room at a lower cost in all."""
        now = placed.get(name)
        for label in islice(self._candidates(name), _PUSHING_CANDIDATES):
            if now is not None and label.cost >= now.cost:
                break
            moved = {other: at for other, at in placed.items() if other != name and not _conflict(label, at)}
            moved[name] = label
            for other in [each for each in placed if each not in moved]:
                if (best := self._cheapest(other, list(moved.values()), math.inf)) is None:
                    break
                moved[other] = best
            else:
                if now is None or _sum_of_costs(moved) < _sum_of_costs(placed):
                    return moved
        return placed

    def _cheapest(self, name: str, placed: Sequence[PlacedLabel], below: float) -> PlacedLabel | None:
        """Return the cheapest candidate without conflict that costs less than `below`."""
        for label in self._candidates(name):
            if label.cost >= below:
                return None
            if not any(_conflict(label, other) for other in placed):
                return label
        return None

    def _candidates(self, name: str) -> Iterator[PlacedLabel]:
        """Yield the candidates of one label, cheapest first; each is computed once."""
        known = self._known[name]
        yield from list(known)
        for label in self._further[name]:
            known.append(label)
            yield label

    def _free_candidates(self, name: str) -> Iterator[PlacedLabel]:
        """Yield the candidates of one label that are clear of all points, cheapest first."""
        own, waiting = self._points[name], list[tuple[float, int, PlacedLabel]]()
        for i, label in enumerate(_candidates(own, text_width(self._words[name]))):
            while waiting and waiting[0][0] <= label.cost - 5:  # candidates come in order of their cost, up to 5
                yield heappop(waiting)[2]
            if _contains(self._area, label.box) and self._is_clear_whose(label, own):
                dear = replace(label, cost=label.cost + self._cost_of_lines(label, own))
                heappush(waiting, (dear.cost, i, dear))
        while waiting:
            yield heappop(waiting)[2]

    def _is_clear_whose(self, label: PlacedLabel, own: Point) -> bool:
        """Return whether label and leader touch no point, and a reader sees whose label it is."""
        for at in self._all:
            distance = label.box.distance_to(at)
            if distance < POINT_RADIUS:
                return False
            if label.leader is None:
                if distance < _NEAR_ENOUGH and math.dist(at, own) >= _SAME_PLACE:
                    return False
            elif distance_to_line(at, label.leader) < min(POINT_RADIUS, math.dist(at, own) / 2):
                return False
        return True

    def _cost_of_lines(self, label: PlacedLabel, own: Point) -> float:
        """Return the cost of the figure's lines that label and leader touch, a line that ends at the point excepted."""
        cost = 0.0
        for line in self._lines:
            if touches_box(line, label.box):
                cost += _COVERED_LINE_COST
            ends_here = min(math.dist(line.start, own), math.dist(line.end, own)) < _SAME_PLACE
            if label.leader is not None and not ends_here and lines_cross(label.leader, line):
                cost += _CROSSED_LINE_COST
        return cost


def _candidates(point: Point, width: float) -> Iterator[PlacedLabel]:
    """Yield places for a label: beside the point, then at the ends of leaders in all directions, longer and longer."""
    x, y = point
    beside = POINT_RADIUS + 3.5
    yield _label((x + beside, y), "start", width, None, 0)
    yield _label((x - beside, y), "end", width, None, 1)
    yield _label((x, y - beside - 5), "middle", width, None, 8)
    yield _label((x, y + beside + 5), "middle", width, None, 8)
    for dy in (-9.0, 9.0):
        yield _label((x + beside - 2, y + dy), "start", width, None, 5)
        yield _label((x - beside + 2, y + dy), "end", width, None, 5)
    for length in _LEADER_LENGTHS:
        for dx, dy in _DIRECTIONS:
            start = x + dx * POINT_RADIUS, y + dy * POINT_RADIUS
            end = start[0] + dx * length, start[1] + dy * length
            leader = LineSegment(start, end)
            cost = _LEADER_COST + length + 3 * abs(dy)
            if abs(dx) > 0.25:
                side = math.copysign(3, dx)
                yield _label((end[0] + side, end[1]), "start" if dx > 0 else "end", width, leader, cost)
            if abs(dy) > 0.5:
                yield _label((end[0], end[1] + math.copysign(8, dy)), "middle", width, leader, cost + 2)


def _label(at: Point, anchor: TextAnchor, width: float, leader: LineSegment | None, cost: float) -> PlacedLabel:
    """Return a label whose text is vertically centered on `at`."""
    x, baseline = at[0], at[1] + 4
    left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
    margins = {"start": (0, _MARGIN), "middle": (_MARGIN, _MARGIN), "end": (_MARGIN, 0)}[anchor]
    box = LabelBox(left - margins[0], baseline - _ASCENT, left + width + margins[1], baseline + _DESCENT)
    return PlacedLabel((x, baseline), anchor, box, leader, cost)


def _conflict(one: PlacedLabel, other: PlacedLabel) -> bool:
    """Return whether two labels touch each other, or each other's leaders, or their leaders cross."""
    if one.box.overlaps(other.box):
        return True
    if one.leader is not None and touches_box(one.leader, other.box):
        return True
    if other.leader is not None and touches_box(other.leader, one.box):
        return True
    return (
        one.leader is not None
        and other.leader is not None
        and lines_cross(lengthen(one.leader), lengthen(other.leader))
    )


def _sum_of_costs(placed: Mapping[str, PlacedLabel]) -> float:
    return sum(label.cost for label in placed.values())


def _contains(area: LabelBox, box: LabelBox) -> bool:
    return box.left >= area.left and box.right <= area.right and box.top >= area.top and box.bottom <= area.bottom
