"""Regions that overlap: every common element once, and whole matrices in few blocks."""

from __future__ import annotations

import random

import pytest

from unipar.backend.engine import Region
from unipar.checkpoint.overlaps import Overlap, find_overlaps


def elements(region: Region) -> list[int]:
    step = region.stride or region.length
    return [region.start + run * step + i for run in range(region.runs) for i in range(region.length)]


def pairs(found: list[Overlap]) -> list[tuple[int, int]]:
    return [
        (o.wanted + run * o.wanted_stride + i, o.saved + run * o.saved_stride + i)
        for o in found
        for run in range(o.runs)
        for i in range(o.length)
    ]


def drawn(draw: random.Random) -> Region:
    length, runs = draw.randint(0, 9), draw.randint(1, 6)
    stride = draw.choice((length + draw.randint(0, 5), 12)) if runs > 1 else 0
    return Region(draw.randint(0, 30), min(length, stride) if runs > 1 else length, stride, runs)


@pytest.mark.parametrize("seed", range(20))
def test_every_common_element_is_found_once(seed: int) -> None:
    """Of regions drawn at random the overlaps are the elements that both lists have, and no others."""
    draw = random.Random(seed)
    for _ in range(300):
        wanted, saved = drawn(draw), drawn(draw)
        at = {element: place for place, element in enumerate(elements(saved))}
        common = [(place, at[element]) for place, element in enumerate(elements(wanted)) if element in at]
        assert sorted(pairs(list(find_overlaps(wanted, saved)))) == common, (wanted, saved)


def test_a_part_of_a_matrix_is_one_block() -> None:
    """Columns out of a whole matrix, and columns out of other columns, are one block whatever the number of rows."""
    whole, left, middle = Region(0, 6_000_000), Region(0, 3, 6, 1_000_000), Region(2, 2, 6, 1_000_000)
    assert list(find_overlaps(left, whole)) == [Overlap(0, 0, 3, 1_000_000, 3, 6)]
    assert list(find_overlaps(whole, left)) == [Overlap(0, 0, 3, 1_000_000, 6, 3)]
    assert list(find_overlaps(left, middle)) == [Overlap(2, 0, 1, 1_000_000, 3, 2)]
    assert list(find_overlaps(Region(60, 30), whole)) == [Overlap(0, 60, 30)]


def test_rows_out_of_columns() -> None:
    """A range that begins and ends within runs takes a part of the first and of the last one."""
    assert list(find_overlaps(Region(7, 12), Region(0, 4, 6, 5))) == [
        Overlap(0, 5, 3),
        Overlap(5, 8, 4),
        Overlap(11, 12, 1),
    ]
