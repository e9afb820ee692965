"""What came and went unseen, told from a counter that heeds all threads.

A profiler writes down what happens in the threads to which torch hands its state. A thread of gloo's may be the last to
let go of a tensor, and Horovod's has a buffer of its own. The counter of the next event tells how much that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

MAX_BLOCKS_AT_ONCE: Final = 3
"""How many blocks that went between two events are told apart."""

MAX_CANDIDATES: Final = 40
"""Of how many of each size at most."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A block that came, or went."""

    address: int
    size: int
    """Below 0 where it goes."""

    live: int
    """What the counter said afterwards."""

    thread: int


@dataclass(slots=True)
class _OpenBlock:
    """A block that nobody saw go."""

    change: BlockChange
    came: int
    gone: int
    """It went before this event: its address was given out again."""


def fill_gaps(seen: Sequence[BlockChange]) -> tuple[list[BlockChange], list[int]]:
    """All changes; and where among them each that was seen is, and the end."""
    left = _blocks_never_freed(seen)
    made: list[BlockChange] = []
    places: list[int] = []
    open_now: list[_OpenBlock] = []
    live = bytes_before(seen)
    for i, change in enumerate(seen):
        if gap := change.live - change.size - live:
            for address, size in _missing_changes(gap, i, open_now):
                live += size
                made.append(BlockChange(address, size, live, -1))
                if size > 0:
                    open_now.append(_OpenBlock(made[-1], i, len(seen)))
        live = change.live
        if i in left:
            open_now.append(left[i])
        places.append(len(made))
        made.append(change)
    return made, [*places, len(made)]


def bytes_before(seen: Sequence[BlockChange]) -> int:
    """What the counter said before."""
    return seen[0].live - seen[0].size if seen else 0


def _blocks_never_freed(seen: Sequence[BlockChange]) -> dict[int, _OpenBlock]:
    """By their place the blocks that came, and were not seen to go."""
    last: dict[int, int] = {}
    found: dict[int, _OpenBlock] = {}
    for i, change in enumerate(seen):
        before = last.pop(change.address, None)
        if change.size > 0:
            last[change.address] = i
            if before is not None:
                found[before] = _OpenBlock(seen[before], before, i)
    found.update((i, _OpenBlock(seen[i], i, len(seen))) for i in last.values())
    return found


def _missing_changes(gap: int, now: int, open_now: list[_OpenBlock]) -> Iterable[tuple[int, int]]:
    """The blocks that came or went unseen: address and size."""
    if gap > 0:
        return [(-now - 1, gap)]
    gone = _blocks_of_total_size(-gap, open_now)
    if gone is None:
        return [(-now - 1, gap)]  # of nobody knows which
    for block in gone:
        open_now.remove(block)
    return [(block.change.address, -block.change.size) for block in gone]


def _blocks_of_total_size(size: int, open_now: Sequence[_OpenBlock]) -> Sequence[_OpenBlock] | None:
    """Blocks of that size together: first those whose address was soonest given out again, then the youngest."""
    ordered = sorted(open_now, key=lambda block: (block.gone, -block.came))
    fitting = [block for block in ordered if block.change.size <= size]
    for number in range(1, MAX_BLOCKS_AT_ONCE + 1):
        for blocks in combinations(fitting[:MAX_CANDIDATES] if number > 1 else fitting, number):
            if sum(block.change.size for block in blocks) == size:
                return blocks
    return None
