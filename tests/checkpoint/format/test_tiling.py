"""Regions that tile a tensor, and those that do not: by example, and against counting element by element."""

from __future__ import annotations

import random
import time

import pytest

from unipar.backend import Region
from unipar.checkpoint.format.tiling import explain_tiling_fault


@pytest.mark.parametrize(
    ("regions", "numel"),
    [
        ([], 0),
        ([Region(0, 12)], 12),
        ([Region(5, 7), Region(0, 5)], 12),
        ([Region(0, 2, 4, 3), Region(2, 2, 4, 3)], 12),  # columns of a matrix
        ([Region(0, 2, 4, 2), Region(2, 2, 4, 3), Region(8, 2)], 12),  # the last row apart
        ([Region(0, 3), Region(3, 3, 6, 2), Region(6, 3)], 12),  # runs that end in the next row
        ([Region(0, 1, 2, 6), Region(1, 1, 4, 3), Region(3, 1, 4, 3)], 12),  # two strides
        ([Region(0, 4, 4, 3), Region(0, 0)], 12),  # runs that touch, and an empty region
    ],
)
def test_regions_that_tile(regions: list[Region], numel: int) -> None:
    """Each element is in exactly one region."""
    assert explain_tiling_fault(regions, numel) is None


@pytest.mark.parametrize(
    ("regions", "numel", "fault"),
    [
        ([], 1, ("hold 0 of 1 elements", [])),
        ([Region(0, 5), Region(6, 6)], 12, ("hold 11 of 12 elements", [])),
        ([Region(0, 7), Region(6, 6)], 12, ("overlap", [0, 1])),
        ([Region(0, 6), Region(6, 7)], 12, ("holds elements up to 13 of 12", [1])),
        ([Region(-1, 6)], 12, ("holds elements up to 5 of 12", [0])),
        ([Region(0, 3, 4, 3), Region(2, 2, 4, 3)], 12, ("overlap", [0, 1])),
        ([Region(0, 3, 2, 3)], 12, ("overlaps itself", [0])),
        ([Region(0, 2, 4, 3), Region(2, 2, 4, 2), Region(0, 2)], 12, ("overlap", [0, 2])),
        ([Region(0, 1, 2, 6), Region(1, 1, 4, 3), Region(2, 1, 4, 3)], 12, ("overlap", [0, 2])),
        ([Region(0, 1, 3, 2**40)], 2**50, ("hold 1,099,511,627,776 of 1,125,899,906,842,624 elements", [])),
        (
            [Region(0, 1, 3, 2**40), Region(1, 1, 5, 2**39)],
            2**50,
            ("has 549,755,813,888 runs of different strides; at most 4,000,000 can be checked", []),
        ),
    ],
)
def test_regions_that_do_not(regions: list[Region], numel: int, fault: tuple[str, list[int]]) -> None:
    """The sentence names the regions at fault by number, and a bomb of runs takes no time."""
    assert explain_tiling_fault(regions, numel) == fault


def test_the_verdict_is_that_of_counting() -> None:
    """Three thousand random sets of regions of a small tensor, some cut from boxes and some not; both kinds occur."""
    draw = random.Random(0)
    verdicts = {True: 0, False: 0}
    for _ in range(3000):
        numel = draw.choice((6, 12, 24))
        if draw.random() < 0.5:
            regions = tiles(draw, numel)
            if draw.random() < 0.5 and regions:
                i = draw.randrange(len(regions))
                regions[i] = Region(draw.randrange(numel), *regions[i][1:])
        else:
            regions = [
                Region(draw.randrange(numel), draw.randint(1, 3), draw.randint(3, 6), draw.randint(1, 4))
                for _ in range(draw.randint(1, 5))
            ]
        held = [
            where.start + run * where.stride + i
            for where in regions
            for run in range(where.runs)
            for i in range(where.length)
        ]
        tiled = sorted(held) == list(range(numel))
        verdicts[tiled] += 1
        assert (explain_tiling_fault(regions, numel) is None) == tiled, (regions, numel)
    assert min(verdicts.values()) > 300


def tiles(draw: random.Random, numel: int) -> list[Region]:
    """Return rectangles of a matrix that tile it, in any order."""
    width = draw.choice([w for w in (1, 2, 3, 4, 6) if numel % w == 0])
    rows = numel // width
    cut, at = draw.randint(0, rows), draw.randint(0, width)
    made = [
        Region(first * width + left, right - left, width, last - first)
        for first, last in ((0, cut), (cut, rows))
        for left, right in ((0, at), (at, width))
        if last > first and right > left
    ]
    draw.shuffle(made)
    return made


def test_a_large_matrix_over_many_ranks_takes_no_time() -> None:
    """A matrix of a billion elements, its columns over 1,024 ranks, and over 32 x 32 ranks."""
    rows, width = 32_768, 32_768
    columns = [Region(rank * 32, 32, width, rows) for rank in range(1024)]
    boxes = [Region(i * 1024 * width + j * 1024, 1024, width, 1024) for i in range(32) for j in range(32)]
    began = time.process_time()
    assert explain_tiling_fault(columns, rows * width) is None
    assert explain_tiling_fault(boxes, rows * width) is None
    assert explain_tiling_fault([*boxes[:-1], boxes[0]], rows * width) == ("overlap", [0, 1023])
    assert time.process_time() - began < 2
