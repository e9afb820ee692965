"""Search for the largest microbatch that fits, with few trials."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence


def find_largest(
    candidates: Sequence[int], start: int | None, fits: Callable[[int], bool], hopeless: Callable[[int], bool]
) -> int | None:
    """Return the largest of the ascending candidates that fits, or None if none does.

    The search begins at `start`, or with the smallest candidate if that is None. What is `hopeless` is not tried.
    """
    known: dict[int, bool] = {}

    def good(index: int) -> bool:
        if index not in known:
            known[index] = fits(candidates[index])
        return known[index]

    last = len(candidates) - 1
    at = 0 if start is None else max(0, bisect_right(candidates, start) - 1)
    low, high = -1, last + 1  # below low all fit, from high on nothing does
    if good(at):
        low = at
        while low < last and not hopeless(candidates[low + 1]):
            at = low + 1 if low not in known or len(known) == 1 else _at_least(candidates, 2 * candidates[low], low + 1)
            if hopeless(candidates[at]):
                at = low + 1
            if not good(at):
                high = at
                break
            low = at
    else:
        high = at
        while high > 0:
            at = high - 1 if len(known) == 1 else _at_most(candidates, candidates[high] // 2, high - 1)
            if good(at):
                low = at
                break
            high = at
    while high - low > 1 and low >= 0:
        middle = (low + high) // 2
        if not hopeless(candidates[middle]) and good(middle):
            low = middle
        else:
            high = middle
    # a whole share at once needs no room to accumulate gradients, and so may fit where a part of it did not
    if start is None and low < last and last not in known and not hopeless(candidates[last]) and good(last):
        low = last
    return candidates[low] if low >= 0 else None


def _at_least(candidates: Sequence[int], wanted: int, first: int) -> int:
    """Return the index of the first candidate that is as large as wanted, from `first` to the last one."""
    return min(max(first, bisect_left(candidates, wanted)), len(candidates) - 1)


def _at_most(candidates: Sequence[int], wanted: int, last: int) -> int:
    """Return the index of the last candidate that is not larger than wanted, from the first one to `last`."""
    return max(0, min(last, bisect_right(candidates, wanted) - 1))
