"""Overlaps of two regions of one tensor, as blocks of runs: a split matrix is one copy, not thousands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unipar.backend.engine import Region


class Overlap(NamedTuple):
    """Elements that are in a wanted and in a saved region: `runs` runs of `length` elements.

    Places are counted within each region's own elements, which lie one run after the other.
    """

    wanted: int
    saved: int
    length: int
    runs: int = 1
    wanted_stride: int = 0
    saved_stride: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.length * self.runs


def find_overlaps(wanted: Region, saved: Region) -> Iterator[Overlap]:
    """Yield what two regions have in common; no element is in two of the results."""
    if not (wanted.numel and saved.numel) or wanted.start > _last(saved) or saved.start > _last(wanted):
        return
    if wanted.runs == 1:
        yield from _in_range(wanted.start, wanted.start + wanted.length, saved)
    elif saved.runs == 1:
        for overlap in _in_range(saved.start, saved.start + saved.length, wanted):
            yield _reversed(overlap)
    elif wanted.stride == saved.stride:
        yield from _in_equal_rows(wanted, saved)
    else:
        for run in range(wanted.runs):
            start = wanted.start + run * wanted.stride
            for overlap in _in_range(start, start + wanted.length, saved):
                yield overlap._replace(wanted=overlap.wanted + run * wanted.length)


def _last(region: Region) -> int:
    return region.start + (region.runs - 1) * region.stride + region.length - 1


def _in_range(first: int, end: int, saved: Region) -> Iterator[Overlap]:
    """Yield what the range [first, end) has of a region: a part of one run, whole runs, a part of another."""
    start, length, stride, runs = saved
    stride = stride or length
    at = max(0, (first - start - length) // stride + 1)
    until = min(runs - 1, (end - 1 - start) // stride)
    while at <= until:
        run = start + at * stride
        low, high = max(first, run), min(end, run + length)
        full_runs = (end - run - length) // stride + 1 if low == run and high == run + length else 1
        many = min(full_runs, until - at + 1)
        if low < high:
            yield _merged(low - first, at * length + low - run, high - low, many, stride, length)
        at += many


def _merged(wanted: int, saved: int, length: int, runs: int, wanted_stride: int, saved_stride: int) -> Overlap:
    """Return an overlap; runs that lie one after the other in both regions are one."""
    if runs == 1 or wanted_stride == saved_stride == length:
        return Overlap(wanted, saved, length * runs)
    return Overlap(wanted, saved, length, runs, wanted_stride, saved_stride)


def _reversed(overlap: Overlap) -> Overlap:
    return Overlap(
        overlap.saved, overlap.wanted, overlap.length, overlap.runs, overlap.saved_stride, overlap.wanted_stride
    )


def _in_equal_rows(wanted: Region, saved: Region) -> Iterator[Overlap]:
    """Yield what two regions with the same stride have in common: the same columns in every row."""
    stride, offset = wanted.stride, saved.start - wanted.start
    for rows in range((offset - wanted.length) // stride, (offset + saved.length) // stride + 2):
        # run i of the wanted region beside run i - rows of the saved one, which begins `right` elements later
        right = offset - rows * stride
        low, high = max(0, right), min(wanted.length, right + saved.length)
        first, last = max(0, rows), min(wanted.runs - 1, saved.runs - 1 + rows)
        if low < high and first <= last:
            yield _merged(
                first * wanted.length + low,
                (first - rows) * saved.length + low - right,
                high - low,
                last - first + 1,
                wanted.length,
                saved.length,
            )
