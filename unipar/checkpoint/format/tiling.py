"""Check that regions tile a tensor: every element in exactly one of them, found without visiting elements."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence

from unipar.backend import Region
from unipar.checkpoint.format.names import normal_region

MOST_RUNS = 4_000_000
"""Runs that are checked one by one, where regions of one tensor have different strides; some seconds."""

_Box = tuple[int, int, int, int, int]
"""First and last row (exclusive), first and last column (exclusive), and the number of the region."""


def explain_tiling_fault(regions: Sequence[Region], numel: int) -> tuple[str, list[int]] | None:
    """Return why regions do not tile `numel` elements, and the numbers of those at fault; None if they do.

    Regions inside a tensor of which no two overlap, and which together have as many elements, tile it.
    """
    regions = [normal_region(where) for where in regions]
    for i, where in enumerate(regions):
        end = where.start + (where.runs - 1) * where.stride + where.length
        if where.start < 0 or end > numel:
            return f"holds elements up to {end:,} of {numel:,}", [i]
        if where.runs > 1 and where.stride < where.length:
            return "overlaps itself", [i]
    total = sum(where.numel for where in regions)
    width = _common_width(regions, numel)
    singly = sum(where.runs for where in regions if where.runs > 1 and where.stride != width)
    if singly > MOST_RUNS:
        return f"has {singly:,} runs of different strides; at most {MOST_RUNS:,} can be checked", []
    if pair := _overlapping(regions, width):
        return "overlap", sorted(pair)
    if total != numel:
        return f"hold {total:,} of {numel:,} elements", []
    return None


def _common_width(regions: Sequence[Region], numel: int) -> int:
    """Return the stride of most runs: in rows of that width, a region of that stride is one or two rectangles."""
    runs: Counter[int] = Counter()
    for where in regions:
        if where.runs > 1:
            runs[where.stride] += where.runs
    return runs.most_common(1)[0][0] if runs else max(numel, 1)


def _overlapping(regions: Sequence[Region], width: int) -> tuple[int, int] | None:
    """Return two regions that share an element, or None; a line sweeps over the rows."""
    boxes = sorted(box for i, where in enumerate(regions) for box in _boxes(where, width, i))
    ends = sorted(boxes, key=lambda box: box[1])
    done = 0
    active: list[tuple[int, int, int]] = []  # column intervals of rectangles that the current row cuts; none overlap
    for row, _, left, right, number in boxes:
        while ends[done][1] <= row:
            gone = ends[done]
            del active[bisect_left(active, (gone[2], gone[3], gone[4]))]
            done += 1
        at = bisect_left(active, (left, 0, 0))
        if at < len(active) and active[at][0] < right:
            return active[at][2], number
        if at > 0 and active[at - 1][1] > left:
            return active[at - 1][2], number
        insort(active, (left, right, number))
    return None


def _boxes(where: Region, width: int, number: int) -> Iterator[_Box]:
    """Yield rectangles that make up a region in rows of `width` elements."""
    if where.numel == 0:
        return
    if where.runs > 1 and where.stride == width:
        row, left = divmod(where.start, width)
        right = left + where.length
        yield row, row + where.runs, left, min(right, width), number
        if right > width:  # each run ends in the next row
            yield row + 1, row + 1 + where.runs, 0, right - width, number
        return
    for run in range(where.runs):
        yield from _boxes_of_run(where.start + run * where.stride, where.length, width, number)


def _boxes_of_run(start: int, length: int, width: int, number: int) -> Iterator[_Box]:
    first, left = divmod(start, width)
    last, right = divmod(start + length, width)
    if first == last:
        yield first, first + 1, left, right, number
        return
    if left:
        yield first, first + 1, left, width, number
        first += 1
    if last > first:
        yield first, last, 0, width, number
    if right:
        yield last, last + 1, 0, right, number
