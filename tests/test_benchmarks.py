"""The arithmetic of `make bench`."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.timing import interleaved, interval, ratio


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (12, 3, 10), (20, 6, 15), (100, 40, 61)])
def test_an_interval_holds_the_median_nineteen_times_in_twenty(count: int, low: int, high: int) -> None:
    """By the binomial: of 12 values the third and the tenth, as tables of order statistics have it."""
    found = interval([float(i) for i in range(count, 0, -1)])
    assert (found.middle, found.low, found.high, found.rounds) == ((count + 1) / 2, low, high, count)


def test_loops_take_turns_and_none_is_always_first() -> None:
    """Every round begins with the next one."""
    said: list[str] = []
    ticks = itertools.count()
    loops = {name: lambda name=name: said.append(name) for name in "abc"}
    times = interleaved(loops, 3, 2, lambda: float(next(ticks)))
    assert "".join(said) == "aabbcc" + "bbccaa" + "ccaabb"
    assert times == {"a": [0.5] * 3, "b": [0.5] * 3, "c": [0.5] * 3}


def test_a_ratio_stops_when_its_interval_is_narrow_or_time_is_up() -> None:
    """Two equal loops of real work: at least the least number of pairs, and near 1."""

    def work() -> int:
        return sum(range(20_000))

    found = ratio(work, work, half=0.5, least=12, seconds=5)
    assert found.rounds == 12
    assert 0.5 < found.middle < 2
    assert ratio(work, work, half=0.0, least=2, seconds=0).rounds == 2
