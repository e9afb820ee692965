"""Attribution: from recorded allocations to bytes by category at the peak of each phase."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from unipar.backend import Category
from unipar.memory.account import CATEGORIES, CATEGORY_PRECEDENCE, MEMORY_PHASES, NamedBlock, PhaseName, PhasePeak
from unipar.memory.sources.events import (
    LARGEST_BLOCKS,
    MEMORY_PHASE_OF,
    RUNTIME,
    TENSOR,
    CallSite,
    NamedStorage,
    PoolPeaks,
    RankEvents,
)

HIDDEN_SHARE: Final = 0.02
"""Share of activations that autograd may not have saved; above this, those blocks count as unattributed."""


CURVE_POINTS: Final = 240
"""Number of points of a step's memory curve."""

OUTSIDE_OPERATIONS = "compiled code, or torch's own"
"""Name of what no operation of torch has allocated."""


@dataclass(frozen=True, slots=True)
class PhaseWindow:
    """Events of one phase, from its mark to the next."""

    phase: str
    low: int
    high: int
    peak: int
    live: int
    """Bytes allocated when the phase begins."""

    small: int
    pool: PoolPeaks | None
    seconds: float


class Attribution:
    """Lifetime and category of every recorded block."""

    def __init__(self, events: RankEvents) -> None:
        self._trace = events
        self._live = events.events["live"]
        self._match_frees()
        self.windows = [
            PhaseWindow(a.phase, a.at, b.at, b.peak, a.live, a.small, b.pool, b.when - a.when)
            for a, b in pairwise(events.marks)
        ]
        self._lows = [window.low for window in self.windows]
        self._first = next((w.low for w in self.windows if w.phase == "forward"), len(events.events))
        self._last_resort: dict[int, tuple[Category, str]] = {}
        self._named = self._name_blocks()
        self._hidden: set[int] = set()
        self._site_lows = [site.low for site in events.sites]

    def _match_frees(self) -> None:
        """Find the events at which each block was allocated and freed."""
        open_at: dict[int, int] = {}
        starts: list[int] = []
        ends: list[int] = []
        self._freed: list[tuple[int, int]] = []
        """(event, size) of each freed block that was allocated before the base mark."""
        sizes = self._trace.events["size"].tolist()
        self._address = self._trace.events["address"].tolist()
        for i, (address, size) in enumerate(zip(self._address, sizes, strict=True)):
            if size > 0:
                open_at[address] = len(starts)
                starts.append(i)
                ends.append(len(sizes) + 1)  # not freed, unless a later event says so
            elif (block := open_at.pop(address, None)) is not None:
                ends[block] = i
            else:
                self._freed.append((i, -size))
        self._start, self._end = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        self._size = self._trace.events["size"][self._start]
        self._asked = self._trace.events["asked"][self._start]
        self._tensor_bytes = self._sum_tensors(len(sizes))

    def _sum_tensors(self, events: int) -> np.ndarray[Any, Any]:
        """Return the bytes of tensors that are allocated after each event, as far as they were allocated in these."""
        change = np.zeros(events + 2, dtype=np.int64)
        tensors = np.asarray(self._trace.kinds)[self._start] == TENSOR
        np.add.at(change, self._start[tensors], self._asked[tensors])
        np.add.at(change, self._end[tensors], -self._asked[tensors])
        return np.cumsum(change)[:events]

    def _name_blocks(self) -> dict[int, tuple[Category, str]]:
        """Return category and name of each block that engines named; of several, by CATEGORY_PRECEDENCE."""
        by_address: dict[int, list[int]] = {}
        for block, start in enumerate(self._start.tolist()):
            by_address.setdefault(self._address[start], []).append(block)
        labels: dict[int, tuple[Category, str]] = {}
        for named in self._trace.named:
            block = self._block(by_address, named)
            if block is None:
                continue
            names = self._last_resort if named.last_resort else labels
            before = names.get(block)
            if before is None or CATEGORY_PRECEDENCE[named.category] < CATEGORY_PRECEDENCE[before[0]]:
                names[block] = named.category, named.name
        return labels

    def _block(self, by_address: dict[int, list[int]], named: NamedStorage) -> int | None:
        for block in by_address.get(named.address, ()):
            if self._start[block] < named.at <= self._end[block]:
                return block
        alive = self._alive(named.at - 1)  # the storage may begin inside a larger block
        for block in alive.tolist():
            begins = self._address[self._start[block]]
            if begins <= named.address < begins + int(self._size[block]):
                return block
        return None

    def _alive(self, at: int) -> np.ndarray[Any, Any]:
        """Return the blocks that are allocated after event `at`."""
        return np.nonzero((self._start <= at) & (self._end > at))[0]

    def _window(self, at: int) -> int:
        return bisect_right(self._lows, at) - 1

    def category(self, block: int) -> tuple[Category, str]:
        """Return the category of a block, and its name or the place that allocated it."""
        if (named := self._named.get(block)) is not None:
            return named
        start, end = int(self._start[block]), int(self._end[block])
        site = self._site(start)
        place = site.place if site is not None else ""
        kind = int(self._trace.kinds[start])
        if kind != TENSOR:
            return ("runtime" if kind == RUNTIME else "library"), self._trace.owners[start]
        if self._trace.shared and int(self._trace.events["thread"][start]) != self._trace.thread:
            return "communication", "allocated by another thread"
        if site is not None and site.category is not None:
            return site.category, place
        category = self._by_life(block, start, end)
        if category == "unattributed" and block in self._last_resort:
            return self._last_resort[block]
        if category == "unattributed" and self._freed_elsewhere(end):
            return "communication", f"{place}, freed at the end of a collective".removeprefix(", ")
        return category, place or (OUTSIDE_OPERATIONS if category in ("activations", "temporaries") else "")

    def _freed_elsewhere(self, end: int) -> bool:
        """Return whether a thread other than the training one freed a block: threads of collectives do."""
        threads = self._trace.events["thread"]
        return self._trace.shared and end < len(threads) and int(threads[end]) != self._trace.thread

    def _by_life(self, block: int, start: int, end: int) -> Category:
        """Return the category of an unnamed tensor by its lifetime: one phase, forward to a later phase, or longer."""
        came, went = self._window(start), self._window(end)
        phase = self.windows[came].phase if came >= 0 else ""
        if came == went and end < len(self._trace.events):
            return "temporaries"
        if phase in ("start", "data") and end <= self._first:
            return "temporaries"  # used while the model was built
        if phase not in ("forward", "data"):
            return "unattributed"
        later = self.windows[came + 1 :]
        until = "between" if phase == "forward" else "backward"  # a batch is freed after the next one was read
        broken_off = len(self._trace.events) + (phase == "forward")  # a forward that failed never frees its activations
        over = next((w.high for w in later if w.phase == until and w.low > start), broken_off)
        if phase == "data":
            over = next((w.high for w in later if w.phase == until and w.low > over), len(self._trace.events))
        if end <= over:
            return "unattributed" if block in self._hidden else "activations"
        return "runtime" if phase == "data" else "unattributed"  # runtime: the task's dataset

    def _site(self, at: int) -> CallSite | None:
        i = bisect_right(self._site_lows, at) - 1
        return self._trace.sites[i] if i >= 0 and at < self._trace.sites[i].high else None

    @property
    def built(self) -> int:
        """Number of windows before the first step."""
        return next((i for i, w in enumerate(self.windows) if w.phase == "forward"), len(self.windows))

    def phases(self, before: Sequence[PhaseWindow], step: Sequence[PhaseWindow]) -> Iterator[PhasePeak]:
        """Yield the peak of each phase: "built" from the windows `before` the first step, all others from a step."""
        for name in MEMORY_PHASES:
            windows = before if name == "built" else step
            if any(MEMORY_PHASE_OF.get(w.phase) == name for w in windows):
                yield self.phase(name, windows)

    def phase(self, name: PhaseName, windows: Sequence[PhaseWindow]) -> PhasePeak:
        """Return the highest peak of a phase among the given windows."""
        return self._at_peak(
            name, max((w for w in windows if MEMORY_PHASE_OF.get(w.phase) == name), key=lambda w: w.peak)
        )

    def _at_peak(self, name: PhaseName, window: PhaseWindow) -> PhasePeak:
        at, live, small = window.low - 1, window.live, window.small
        if window.high > window.low:
            fullest = window.low + int(np.argmax(self._live[window.low : window.high]))
            if int(self._live[fullest]) > live:
                at, small = fullest, int(self._trace.events["small"][fullest])
        peak = window.peak - self._trace.base
        held: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        blocks: list[NamedBlock] = []
        for block in self._alive(at).tolist():
            category, label = self.category(block)
            size = int(self._asked[block])
            held[category] += size
            held["runtime"] += int(self._size[block]) - size  # malloc's rounding
            blocks.append(NamedBlock(category=category, name=label, size=size))
        held["runtime"] += small - self._trace.base_small
        held["runtime"] -= sum(size for i, size in self._freed if i <= at)
        rest = peak - sum(held.values())  # allocations between two recorded events, and rounding of unknown size
        rounded = min(max(0, rest), self._slack(at))
        held["runtime"] += rounded
        held["unattributed"] += rest - rounded
        blocks.sort(key=lambda b: -b.size)
        return PhasePeak(
            name=name,
            peak=peak,
            held={category: size for category, size in held.items() if size},
            largest=tuple(blocks[:LARGEST_BLOCKS]),
            tensors=self._tensors_at_peak(window),
            **({} if window.pool is None else asdict(window.pool)),
        )

    def _tensors_at_peak(self, window: PhaseWindow) -> dict[Category, int]:
        """Return bytes by category, without those of libraries and of the runtime, when their sum is highest."""
        first = max(0, window.low - 1)
        bytes_then = self._tensor_bytes[first : max(window.high, first + 1)]
        at = first + int(np.argmax(bytes_then)) if len(bytes_then) else window.low - 1
        held: dict[Category, int] = {}
        for block in self._alive(at).tolist():
            category, _ = self.category(block)
            if category not in ("library", "runtime"):
                held[category] = held.get(category, 0) + int(self._asked[block])
        return held

    def _slack(self, at: int) -> int:
        """Return the bytes by which the blocks allocated after event `at` may be larger than recorded."""
        slack = self._trace.slack
        return sum(slack[start] for start in self._start[self._alive(at)].tolist()) if slack else 0

    def saved(self, low: int, high: int, addresses: AbstractSet[int]) -> tuple[int, int]:
        """Return bytes of activations of a forward between two events: all, and those at `addresses` saved by autograd.

        If they differ by more than `HIDDEN_SHARE`, the blocks that autograd did not save become unattributed, in this
        forward and in every other one with the same sequence of allocations.
        """
        allocated = self._tensors(low, high)
        activations = [b for b in allocated if self._end[b] >= high and self.category(b)[0] == "activations"]
        unknown = {b for b in activations if self._address[self._start[b]] not in addresses}
        total = sum(int(self._asked[b]) for b in activations)
        known = total - sum(int(self._asked[b]) for b in unknown)
        if total - known > HIDDEN_SHARE * total:
            asked = self._asked[allocated].tolist()
            places = [i for i, b in enumerate(allocated) if b in unknown]
            for window in self.windows:
                blocks = self._tensors(window.low, window.high) if window.phase == "forward" else []
                if len(blocks) == len(allocated) and self._asked[blocks].tolist() == asked:
                    self._hidden.update(blocks[i] for i in places)
        return total, known

    def _tensors(self, low: int, high: int) -> list[int]:
        """Return the blocks of tensors that were allocated between two events, in order."""
        blocks = np.nonzero((self._start >= low) & (self._start < high))[0].tolist()
        return [b for b in blocks if int(self._trace.kinds[self._start[b]]) == TENSOR]

    def curve(self, windows: Sequence[PhaseWindow], seconds: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield a step's memory curve: (time from 0 to 1, bytes beyond the base).

        `seconds` is the length of each window; within a window, events are evenly spaced in time. The highest point of
        a window is its measured peak, which includes blocks too small to be recorded.
        """
        events = sum(window.high - window.low for window in windows)
        if not events:
            return
        for window, (begins, ends) in zip(windows, pairwise(_cumulative_shares(seconds)), strict=True):
            yield begins, window.live - self._trace.base
            count = window.high - window.low
            points = min(count, max(1, round(CURVE_POINTS * count / events)))
            inside: list[tuple[float, int]] = []
            for part in np.array_split(np.arange(window.low, window.high), points) if count else ():
                along = (int(part[0]) + 1 - window.low) / (count + 1)
                inside.append((begins + along * (ends - begins), int(self._live[part].max())))
            for at, live in _reaching(window, inside, (begins + ends) / 2):
                yield at, live - self._trace.base
        yield 1.0, int(self._live[windows[-1].high - 1]) - self._trace.base

    def marked(self, windows: Sequence[PhaseWindow], seconds: Sequence[float]) -> Iterator[tuple[float, str]]:
        """Yield the start of each phase in the step: (time from 0 to 1, phase)."""
        for window, begins in zip(windows, _cumulative_shares(seconds), strict=False):
            yield begins, window.phase


def plain_step_seconds(shown: Sequence[PhaseWindow], plain: Sequence[Sequence[PhaseWindow]]) -> list[float]:
    """Return the shortest time of each window among plain steps with the same phases; without any, its time in `shown`.

    Passes that record more than a plain one are slower.
    """
    same_phases = [step for step in plain if [window.phase for window in step] == [window.phase for window in shown]]
    return [min(window.seconds for window in same) for same in zip(*(same_phases or [shown]), strict=True)]


def _reaching(window: PhaseWindow, points: Sequence[tuple[float, int]], middle: float) -> Iterable[tuple[float, int]]:
    """Return a window's points with the highest raised to the measured peak, which includes unrecorded small blocks.

    If there are no points, return one in the middle, provided that the peak is above the window's first value.
    """
    if window.peak <= max(window.live, *(live for _, live in points), 0):
        return points
    if not points:
        return [(middle, window.peak)]
    highest = max(range(len(points)), key=lambda i: points[i][1])
    return [(at, window.peak if i == highest else live) for i, (at, live) in enumerate(points)]


def _cumulative_shares(seconds: Sequence[float]) -> list[float]:
    """Return the starts of all windows, and the end of the last one, on a scale from 0 to 1."""
    total = sum(seconds) or 1.0
    return [min(1.0, at / total) for at in accumulate(seconds, initial=0.0)]
