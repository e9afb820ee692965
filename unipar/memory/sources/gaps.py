"""Reconstruction of allocations and frees that a profiler missed, from a counter that covers all threads.

A profiler records only threads to which torch passes its state. A thread of gloo may be the last to free a tensor, and
Horovod's thread has a buffer of its own. The counter at the next recorded event shows how many bytes were missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

MAX_BLOCKS_AT_ONCE: Final = 3
"""Largest number of blocks freed between two events that are searched for."""

MAX_CANDIDATES: Final = 40
"""Number of blocks among which a combination of several is searched for."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """An allocation or a free of a block."""

    address: int
    size: int
    """Bytes; negative for a free."""

    live: int
    """Value of the counter after the change."""

    thread: int


@dataclass(slots=True)
class _OpenBlock:
    """Block whose free was not recorded."""

    change: BlockChange
    came: int
    gone: int
    """Event before which the block was freed, because its address was allocated again; else the number of events."""


def fill_gaps(recorded: Sequence[BlockChange]) -> tuple[list[BlockChange], list[int]]:
    """Return all changes, missing ones included; and the index among them of each recorded one, and of the end."""
    never_freed = _blocks_never_freed(recorded)
    changes: list[BlockChange] = []
    places: list[int] = []
    open_now: list[_OpenBlock] = []
    live = bytes_before(recorded)
    for i, change in enumerate(recorded):
        if gap := change.live - change.size - live:
            for address, size in _missing_changes(gap, i, open_now):
                live += size
                changes.append(BlockChange(address, size, live, -1))
                if size > 0:
                    open_now.append(_OpenBlock(changes[-1], i, len(changes)))
        live = change.live
        if i in never_freed:
            open_now.append(never_freed[i])
        places.append(len(changes))
        changes.append(change)
    return changes, [*places, len(changes)]


def bytes_before(changes: Sequence[BlockChange]) -> int:
    """Return the value of the counter before the first change."""
    return changes[0].live - changes[0].size if changes else 0


def _blocks_never_freed(changes: Sequence[BlockChange]) -> dict[int, _OpenBlock]:
    """Return the blocks that have no recorded free, by the index of their allocation."""
    last: dict[int, int] = {}
    open_blocks: dict[int, _OpenBlock] = {}
    for i, change in enumerate(changes):
        before = last.pop(change.address, None)
        if change.size > 0:
            last[change.address] = i
            if before is not None:
                open_blocks[before] = _OpenBlock(changes[before], before, i)
    open_blocks.update((i, _OpenBlock(changes[i], i, len(changes))) for i in last.values())
    return open_blocks


def _missing_changes(gap: int, now: int, open_now: list[_OpenBlock]) -> Iterable[tuple[int, int]]:
    """Return the changes that explain a gap in the counter: (address, size) of each."""
    if gap > 0:
        return [(-now - 1, gap)]
    gone = _blocks_of_total_size(-gap, open_now)
    if gone is None:
        return [(-now - 1, gap)]  # no known blocks add up to the gap: a free at an invented address
    for block in gone:
        open_now.remove(block)
    return [(block.change.address, -block.change.size) for block in gone]


def _blocks_of_total_size(size: int, open_now: Sequence[_OpenBlock]) -> Sequence[_OpenBlock] | None:
    """Return blocks that add up to `size`; preferred are those whose address was reused soonest, then the youngest."""
    ordered = sorted(open_now, key=lambda block: (block.gone, -block.came))
    fitting = [block for block in ordered if block.change.size <= size]
    for number in range(1, MAX_BLOCKS_AT_ONCE + 1):
        for blocks in combinations(fitting[:MAX_CANDIDATES] if number > 1 else fitting, number):
            if sum(block.change.size for block in blocks) == size:
                return blocks
    return None
