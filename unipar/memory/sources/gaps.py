"""What came and went unseen, told from a counter that heeds all threads.

A profiler writes down what happens in the threads to which torch hands its state. A thread of gloo's may be the last to
let go of a tensor, and Horovod's has a buffer of its own. The counter of the next event tells how much that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

AT_ONCE: Final = 3
"""How many blocks that went between two events are told apart."""

MANY: Final = 40
"""Of how many of each size at most."""


@dataclass(frozen=True, slots=True)
class Change:
    """A block that came, or went."""

    address: int
    size: int
    """Below 0 where it goes."""

    live: int
    """What the counter said afterwards."""

    thread: int


@dataclass(slots=True)
class _Open:
    """A block that nobody saw go."""

    change: Change
    came: int
    gone: int
    """It went before this event: its address was given out again."""


def whole(seen: Sequence[Change]) -> tuple[list[Change], list[int]]:
    """All changes; and where among them each that was seen is, and the end."""
    left = _unclosed(seen)
    made: list[Change] = []
    places: list[int] = []
    open_now: list[_Open] = []
    live = base(seen)
    for i, change in enumerate(seen):
        if gap := change.live - change.size - live:
            for address, size in _filled(gap, i, open_now):
                live += size
                made.append(Change(address, size, live, -1))
                if size > 0:
                    open_now.append(_Open(made[-1], i, len(seen)))
        live = change.live
        if i in left:
            open_now.append(left[i])
        places.append(len(made))
        made.append(change)
    return made, [*places, len(made)]


def base(seen: Sequence[Change]) -> int:
    """What the counter said before."""
    return seen[0].live - seen[0].size if seen else 0


def _unclosed(seen: Sequence[Change]) -> dict[int, _Open]:
    """By their place the blocks that came, and were not seen to go."""
    last: dict[int, int] = {}
    found: dict[int, _Open] = {}
    for i, change in enumerate(seen):
        before = last.pop(change.address, None)
        if change.size > 0:
            last[change.address] = i
            if before is not None:
                found[before] = _Open(seen[before], before, i)
    found.update((i, _Open(seen[i], i, len(seen))) for i in last.values())
    return found


def _filled(gap: int, now: int, open_now: list[_Open]) -> Iterable[tuple[int, int]]:
    """The blocks that came or went unseen: address and size."""
    if gap > 0:
        return [(-now - 1, gap)]
    gone = _gone(-gap, open_now)
    if gone is None:
        return [(-now - 1, gap)]  # of nobody knows which
    for block in gone:
        open_now.remove(block)
    return [(block.change.address, -block.change.size) for block in gone]


def _gone(size: int, open_now: Sequence[_Open]) -> Sequence[_Open] | None:
    """Blocks of that size together: first those whose address was soonest given out again, then the youngest."""
    ordered = sorted(open_now, key=lambda block: (block.gone, -block.came))
    fitting = [block for block in ordered if block.change.size <= size]
    for number in range(1, AT_ONCE + 1):
        for blocks in combinations(fitting[:MANY] if number > 1 else fitting, number):
            if sum(block.change.size for block in blocks) == size:
                return blocks
    return None
