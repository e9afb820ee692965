"""Timing of loops against each other: interleaved, by CPU time, with a confidence interval."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

Loop = Callable[[], object]
"""Function that takes one optimizer step."""


def count_calls(step: Loop) -> int:
    """Return the number of calls of Python and built-in functions in one step.

    Each is counted; cProfile's statistics add functions of one name up, such as `__init__` of two dataclasses.
    """
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return calls - 1  # without that of sys.setprofile


def interleaved(
    loops: Mapping[str, Loop],
    rounds: int,
    steps: int,
    clock: Callable[[], float] = time.process_time,
    before: Loop = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds per step of each loop in each round; every round begins with another loop.

    `before` is called before each loop's turn, and is not in its time.
    """
    names = list(loops)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        at = i % len(names)
        for name in [*names[at:], *names[:at]]:
            step = loops[name]
            before()
            began = clock()
            for _ in range(steps):
                step()
            seconds[name].append((clock() - began) / steps)
    return seconds


@dataclass(frozen=True)
class Interval:
    """Median with its 95 % confidence interval."""

    middle: float
    low: float
    high: float
    rounds: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def interval(values: list[float]) -> Interval:
    """Return the median's interval by order statistics, which assume no distribution of the values."""
    n, ordered = len(values), sorted(values)
    tail, outside = 0.5**n, 0
    while tail <= 0.025 and outside < n // 2:  # drop as many values on each side as still leave 95 % between
        outside += 1
        tail += math.comb(n, outside) * 0.5**n
    low = max(outside - 1, 0)
    return Interval(statistics.median(values), ordered[low], ordered[n - 1 - low], n)


def time_ratio(mine: Loop, theirs: Loop, *, half: float = 0.02, least: int = 12, seconds: float = 60.0) -> Interval:
    """Return the CPU time of `mine` over `theirs`, in alternating steps, until the interval is narrow or time is up."""
    pairs: list[float] = []
    until = time.monotonic() + seconds
    while True:
        times = interleaved({"mine": mine, "theirs": theirs}, 2, 1)
        pairs += [a / b for a, b in zip(times["mine"], times["theirs"], strict=True)]
        if len(pairs) >= least and (interval(pairs).half <= half or time.monotonic() > until):
            return interval(pairs)
