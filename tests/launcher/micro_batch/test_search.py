"""Search for the largest microbatch that fits."""

from __future__ import annotations

from itertools import product

import pytest

from unipar.launcher.micro_batch.search import find_largest

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]


def search(most: int, start: int | None, hopeless: int = 10**6) -> tuple[int | None, list[int]]:
    """Return what is found if all sizes up to `most` fit, and what was tried."""
    tried: list[int] = []

    def fits(micro: int) -> bool:
        tried.append(micro)
        return micro <= most

    return find_largest(SIZES, start, fits, lambda micro: micro >= hopeless), tried


def test_finds_the_largest() -> None:
    """Wherever it begins, and without trying anything twice."""
    for start, most in product([None, *SIZES], [0, *SIZES, 200]):
        found, tried = search(most, start)
        assert found == max((size for size in SIZES if size <= most), default=None), (start, most)
        assert len(tried) == len(set(tried)) <= 8, (start, most)


@pytest.mark.parametrize(
    ("most", "start", "hopeless", "tried"),
    [
        (16, 16, 24, [16]),  # the plan is right, and the next size is far beyond the limit
        (16, 16, 32, [16, 24]),  # the next size might fit
        (16, 24, 32, [24, 16]),
        (96, 96, 10**6, [96]),
        (0, 2, 3, [2, 1]),
        (4, None, 10**6, [1, 2, 4, 8, 6, 96]),
    ],
)
def test_few_trials(most: int, start: int | None, hopeless: int, tried: list[int]) -> None:
    """One or two where the plan is right; doubling where there is none."""
    assert search(most, start, hopeless)[1] == tried


def test_a_whole_share_may_fit_where_a_part_does_not() -> None:
    """Without accumulation no gradients are kept: the last size is tried as well if nothing is planned."""
    assert find_largest([1, 2, 4], None, lambda micro: micro == 4, lambda _: False) == 4
