"""Throughput against memory: who is on the front, and labels that stay clear of all else, wherever the points are."""

from __future__ import annotations

import html
import random
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from tests.support.comparisons import edit_example_comparison, example_with_points, write_example_comparison
from unipar.report.charts.labels import COLUMN_LINE
from unipar.report.charts.pareto import draw_pareto, pareto_front
from unipar.report.charts.svg import LETTER_WIDTH
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison

Point = tuple[float, float]
Box = tuple[float, float, float, float]
KINDS = ("apart", "cluster", "two clusters", "tight", "corner", "equal", "row", "column", "outlier")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_comparison(tmp_path / "run")


def scatter(kind: str, count: int, seed: int) -> list[Point]:
    """Return points in MiB and samples a second, scattered in one way."""
    draw = random.Random(f"{kind} {count} {seed}")

    def around(x: float, y: float, share: float) -> Point:
        return x * draw.uniform(1 - share, 1 + share), y * draw.uniform(1 - share, 1 + share)

    if kind == "equal":
        return [(150.0, 30.0)] * count
    if kind == "row":
        return [(100 + 8.0 * i, 30.0) for i in range(count)]
    if kind == "column":
        return [(150.0, 20 + 1.0 * i) for i in range(count)]
    if kind == "outlier":
        return [(2048.0, 20.0), *(around(150, 30, 0.1) for _ in range(count - 1))]
    if kind == "two clusters":
        return [around(*draw.choice(((110.0, 18.0), (190.0, 40.0))), 0.06) for _ in range(count)]
    if kind == "corner":  # the first point makes the scales, so the others are in its far corner
        return [(20.0, 4.0), *(around(200, 40, 0.01) for _ in range(count - 1))]
    return [around(150, 30, {"apart": 0.7, "cluster": 0.1, "tight": 0.02}[kind]) for _ in range(count)]


def labels_of(drawn: str) -> list[Box]:
    """Return the rectangle of each label, as wide as letters of 6.9 pixels."""
    boxes: list[Box] = []
    found = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)" class="name label"(?: text-anchor="(\w+)")?>([^<]+)<', drawn)
    for x, y, anchor, words in found:
        width = (LETTER_WIDTH - 0.3) * len(html.unescape(words))
        left = float(x) - {"": 0, "middle": width / 2, "end": width}[anchor]
        boxes.append((left, float(y) - 9.5, left + width, float(y) + 3))
    return boxes


def points_of(drawn: str) -> list[Point]:
    """Return the middle of each point."""
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5"', drawn)]


def leaders_of(drawn: str) -> list[tuple[Point, Point]]:
    """Return both ends of each leader."""
    numbers = re.findall(r'<line x1="(.*?)" y1="(.*?)" x2="(.*?)" y2="(.*?)" class="leader"', drawn)
    return [((float(a), float(b)), (float(c), float(d))) for a, b, c, d in numbers]


def meet(one: tuple[Point, Point], other: tuple[Point, Point]) -> bool:
    """Return whether two lines cross, by solving for the point in which they do."""
    (ax, ay), (bx, by) = one
    (cx, cy), (dx, dy) = other
    det = (bx - ax) * (dy - cy) - (by - ay) * (dx - cx)
    if abs(det) < 1e-9:
        return False
    at = ((cx - ax) * (dy - cy) - (cy - ay) * (dx - cx)) / det
    there = ((cx - ax) * (by - ay) - (cy - ay) * (bx - ax)) / det
    return 0 < at < 1 and 0 < there < 1


def faults_of(drawn: str, count: int) -> list[str]:
    """Return what touches what in a figure of `count` points."""
    boxes, points, leaders = labels_of(drawn), points_of(drawn), leaders_of(drawn)
    height = float(re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', drawn)[0])
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', drawn)[0])
    found = [f"{len(boxes)} labels, {len(points)} points"] if (len(boxes), len(points)) != (count, count) else []
    for box in boxes:
        if box[0] < 0 or box[2] > width + 1 or box[1] < 0 or box[3] > height:
            found.append(f"a label leaves the figure: {box}")
        found += [f"a label on a point: {at}" for at in points if _gap(box, at) < 5.5]
        for (x1, y1), (x2, y2) in leaders:
            if any(_gap(box, (x1 + (x2 - x1) * i / 400, y1 + (y2 - y1) * i / 400)) == 0 for i in range(401)):
                found.append(f"a leader on a label: {box}")
    for a, b in combinations(boxes, 2):
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
            found.append(f"a label on a label: {a}, {b}")
    return found + [f"leaders cross: {a}, {b}" for a, b in combinations(leaders, 2) if meet(a, b)]


def _gap(box: Box, at: Point) -> float:
    x, y = at
    return max(box[0] - x, x - box[2], box[1] - y, y - box[3], 0.0)


@pytest.mark.parametrize(
    ("width", "counts", "seeds"),
    [
        pytest.param(920, (2, 10, 25), (1,), id="screen"),
        pytest.param(350, (10, 25), (1,), marks=pytest.mark.sweep, id="phone"),
        pytest.param(920, range(2, 26), (2, 3), marks=pytest.mark.sweep, id="screen, many"),
        pytest.param(350, range(2, 26), (2, 3), marks=pytest.mark.sweep, id="phone, many"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_touch_nothing(run: Path, kind: str, width: int, counts: Sequence[int], seeds: Sequence[int]) -> None:
    """No label touches a label, a point or a leader, and no leaders cross, for 2 to 25 points in any arrangement."""
    page = ComparisonPageData.read(run)
    found = {
        (count, seed): faults
        for count in counts
        for seed in seeds
        if (faults := faults_of(draw_pareto(example_with_points(page, scatter(kind, count, seed)), None, width), count))
    }
    assert found == {}


def test_labels_stay_clear_of_the_earlier_comparison(run: Path) -> None:
    """Points of the earlier comparison are not covered either."""
    page = ComparisonPageData.read(run)
    now, before = (example_with_points(page, scatter("cluster", 8, seed)) for seed in (1, 2))
    drawn = draw_pareto(now, before, 920)
    earlier = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4"', drawn)]
    assert len(earlier) == 8
    assert [(box, at) for box in labels_of(drawn) for at in earlier if _gap(box, at) < 5] == []
    assert faults_of(drawn, 8) == []


def test_points_apart_need_no_leaders(run: Path) -> None:
    """Each label is beside its point where there is room: at its right, or at its left near the edge."""
    drawn = draw_pareto(example_with_points(ComparisonPageData.read(run), [(50, 30), (90, 20), (120, 10)]), None, 920)
    assert leaders_of(drawn) == []
    boxes, points = labels_of(drawn), points_of(drawn)
    assert [round(boxes[i][0] - points[i][0]) for i in (0, 1)] == [10, 10]
    assert round(points[2][0] - boxes[2][2]) == 10


def test_where_there_is_no_room_labels_are_in_a_column(run: Path) -> None:
    """25 equal points have their labels one below another, beside the plot, each with a leader."""
    drawn = draw_pareto(example_with_points(ComparisonPageData.read(run), scatter("equal", 25, 1)), None, 920)
    boxes = sorted(labels_of(drawn), key=lambda box: box[1])
    assert len({box[0] for box in boxes}) == 1
    assert min(b[1] - a[1] for a, b in pairwise(boxes)) >= COLUMN_LINE - 0.1
    assert len(leaders_of(drawn)) == 25
    grid = [float(x) for x in re.findall(r'x2="([\d.]+)" y2="[\d.]+" class="grid"', drawn)]
    assert max(grid) < boxes[0][0] - 25


def test_on_a_phone_numbers_stand_for_names(run: Path) -> None:
    """Labels are numbers, and a list below the figure says what they mean."""
    drawn = draw_pareto(example_with_points(ComparisonPageData.read(run), [(50, 10), (100, 20)]), None, 350)
    assert re.findall(r'class="name label"[^>]*>([^<]+)<', drawn) == ["1", "2"]
    assert re.findall(r'class="name">([^<]+)<', drawn) == ["1  native/nothing", "2  deepspeed/nothing"]


def test_the_front_holds_what_no_other_beats() -> None:
    """A strategy is on the front if no other has both less memory and more speed."""
    assert pareto_front({"a": (10, 5), "b": (20, 4), "c": (20, 9), "d": (30, 9), "e": (5, 1)}) == ["e", "a", "c"]


def test_one_process_is_a_point_and_not_on_the_front(run: Path) -> None:
    """One process is drawn as a point, and never on the front."""
    one = edit_example_comparison(run, lambda data: data["strategies"][0].update(seconds=[[0.001] * 3] * 3))
    drawn = re.findall(
        r'class="(point[^"]*)"[^>]*><title>([^:]+):', draw_pareto(ComparisonPageData.read(one), None, 900)
    )
    assert ("point", "single") in drawn
    assert [name for kind, name in drawn if kind == "point best"] == [
        *("native/parameters", "deepspeed/gradients", "native/nothing")
    ]
    assert "Filled: no other strategy beats it in both. single, one process, is not ranked." in render_comparison(
        ComparisonPageData.read(one)
    )
