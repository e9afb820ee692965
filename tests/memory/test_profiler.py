"""The account where no meter can be compiled: a profiler's events, and what they leave out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unipar.memory.sources.gaps import BlockChange, fill_gaps
from unipar.memory.sources.profiler import ProfilerSource


def elsewhere(do: Callable[[], object]) -> None:
    """In a thread that the profiler does not record."""
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def block(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_a_profiler_tells_every_block_and_the_peak_of_each_phase() -> None:
    """To the byte; what other threads allocate and free is filled in from the allocator's own counter."""
    gc.collect()  # what other tests have left is not freed while this one records
    source = ProfilerSource()
    source.begin()
    source.mark("start")
    first = block(1_000_000)
    held: list[Tensor] = []
    elsewhere(lambda: held.append(block(300_000)))
    source.mark("forward")
    saved = [block(500_000)]
    where = saved[0].data_ptr()
    elsewhere(saved.clear)
    after = block(7_000)
    at = source.at()
    source.mark("backward")
    del first
    source.mark("end")
    source.end()
    seen = source.collect_events()
    assert seen.events["size"].tolist() == [1_000_000, 300_000, 500_000, -500_000, 7_000, -1_000_000]
    assert seen.events["live"].tolist() == [1_000_000, 1_300_000, 1_800_000, 1_300_000, 1_307_000, 307_000]
    assert [thread == seen.thread for thread in seen.events["thread"].tolist()] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert seen.events["address"][2] == seen.events["address"][3] == where
    assert source.index(at) == 5
    assert seen.events["address"][source.index(at) - 1] == after.data_ptr()
    told = [(mark.at, mark.phase, mark.peak, mark.live) for mark in seen.marks]
    assert told == [
        (0, "start", 0, 0),
        (2, "forward", 1_300_000, 1_300_000),
        (5, "backward", 1_800_000, 1_307_000),
        (6, "end", 1_307_000, 307_000),
    ]


def test_one_after_another() -> None:
    """What is left of the first is below the base of the second; what came in between was not counted."""
    kept: list[Tensor] = []
    bases: list[int] = []
    for size in (9_000, 4_000):
        source = ProfilerSource()
        source.begin()
        source.mark("start")
        kept.append(block(size))
        source.mark("forward")
        source.end()
        elsewhere(lambda: kept.append(block(70_000)))
        seen = source.collect_events()
        assert seen.events["size"].tolist() == [size]
        assert (seen.marks[1].peak - seen.base, seen.marks[1].live - seen.base) == (size, size)
        bases.append(seen.base)
    assert bases[1] - bases[0] == 9_000


A, B, C = 1, 2, 3


@pytest.mark.parametrize(
    ("seen", "filled"),
    [
        pytest.param([(A, 8, 8), (B, 5, 13), (B, -5, 8)], [], id="nothing unseen"),
        pytest.param([(A, 8, 9), (B, 5, 14)], [], id="what was there before"),
        pytest.param([(A, 8, 8), (B, 5, 5)], [(A, -8, 0)], id="one went"),
        pytest.param([(A, 8, 8), (B, 6, 14), (C, 1, 1)], [(B, -6, 8), (A, -8, 0)], id="two went together"),
        pytest.param([(A, 8, 8), (B, 8, 16), (C, 1, 9), (A, 3, 12)], [(A, -8, 8)], id="whose address is used again"),
        pytest.param([(A, 8, 8), (B, 8, 16), (C, 1, 9)], [(B, -8, 8)], id="else the youngest"),
        pytest.param([(A, 8, 8), (B, 5, 20), (B, -5, 8)], [(-2, 7, 15), (-2, -7, 13)], id="one came and went"),
        pytest.param([(A, 8, 8), (B, 5, 6)], [(-2, -7, 1)], id="nobody knows which"),
    ],
)
def test_gaps_of_the_counter_are_filled(seen: list[tuple[int, int, int]], filled: list[tuple[int, int, int]]) -> None:
    """By blocks of exactly that size that were not seen to go; each as address, size and what there is afterwards."""
    changes = [BlockChange(*told, thread=1) for told in seen]
    made, places = fill_gaps(changes)
    assert [(c.address, c.size, c.live) for c in made if c.thread == -1] == filled
    assert [made[place] for place in places[:-1]] == changes
    assert places[-1] == len(made)
