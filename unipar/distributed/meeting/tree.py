"""`RankTree`: what all ranks of a world on several machines give to rank 0 and learn from it, over their links."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from unipar.distributed.meeting.links import Links, RankLink
from unipar.distributed.meeting.neighbours import Neighbours
from unipar.distributed.meeting.text_rounds import result_of, tell_result
from unipar.distributed.world_machines import WorldMachines, name_ranks
from unipar.errors import WorldMismatch

if TYPE_CHECKING:
    import torch.distributed as dist

_SECONDS_A_LEVEL: Final = 1.0
"""Seconds that a rank waits longer than those below it, so that it hears from them who is late."""

_SECONDS_TO_HEAR: Final = 5.0
"""Seconds that a rank waits longer for an answer than rank 0 for what it answers to."""

_WAITING_SECONDS: Final = 0.5
"""Seconds between two calls of `waiting`."""

_FAILED_KEY: Final = "links/failed"
"""Key in the store of why a rank has no links, told by the first one that has none."""


class LinkWatch(Protocol):
    """Part of a watch that the tree tells of failures."""

    def take(self, link: RankLink, message: dict[str, Any]) -> None:
        """Take a message of its launch."""
        ...

    def lost(self, link: RankLink, why: OSError | None) -> None:
        """Take the loss of a link over which its launch has not ended."""
        ...


@final
class _LinkLost(Exception):
    """Loss of a link over which something was to come."""


@final
class RankTree:
    """Ranks of a world on several machines, in a tree whose root is rank 0, which is linked to few of them.

    What equal texts say travels once, whatever the number of ranks that give them.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, neighbours: Neighbours, silence: float) -> None:
        """`silence`: seconds without an answer of another machine's system, after which it is lost."""
        self._store, self._rank, self._size, self._neighbours = store, rank, size, neighbours
        try:
            self.links = Links(store, rank, neighbours, silence)
        except WorldMismatch as e:
            raise WorldMismatch(store.compare_set(_FAILED_KEY, "", str(e)).decode()) from None
        self.machines: WorldMachines | None = None
        """All machines, once this rank knows them."""

        self._changed = threading.Condition()
        self._arrived: dict[tuple[str, int], dict[str, Any]] = {}
        self._lost: dict[int, OSError | None] = {}
        self._failed = False
        self._watching = threading.RLock()
        self._watch: tuple[str, LinkWatch] | None = None
        self._early: list[tuple[RankLink, dict[str, Any]]] = []
        """Messages of a launch that this rank does not watch yet."""

        self._over: set[tuple[str, int]] = set()
        """Launches, and the neighbours that are done with them."""

        self._ended: set[str] = set()
        self.links.read_in_background(self._take, self._lose)

    # What arrives, in the thread that reads the links

    def _take(self, link: RankLink, message: dict[str, Any]) -> None:
        if "round" in message:
            with self._changed:
                self._arrived[message["round"], link.rank] = message
                self._changed.notify_all()
            return
        launch = message["launch"]
        with self._watching:
            if "over" in message:
                self._over.add((launch, link.rank))
            elif self._watch is not None and self._watch[0] == launch:
                self._watch[1].take(link, message)
            elif launch not in self._ended:
                self._early.append((link, message))

    def _lose(self, link: RankLink, why: OSError | None) -> None:
        with self._watching:
            if self._watch is not None and (self._watch[0], link.rank) not in self._over:
                self._watch[1].lost(link, why)
            with self._changed:
                self._lost[link.rank] = why
                self._changed.notify_all()

    # A watch over one launch

    def begin_watch(self, launch: str, watch: LinkWatch) -> None:
        """Give a watch all that is told of failures in its launch, what has come before it began as well."""
        with self._watching:
            self._watch = launch, watch
            early, self._early = self._early, []
            for link, message in early:
                if message["launch"] == launch:
                    watch.take(link, message)
            for link in self.links.all:
                if link.rank in self._lost:
                    watch.lost(link, self._lost[link.rank])

    def end_watch(self, launch: str) -> None:
        """Say at the other ends that this rank is done with a launch: it may leave."""
        self.links.send_to_all({"launch": launch, "over": True})
        with self._watching, self._changed:
            self._watch, self._failed = None, False
            self._ended.add(launch)

    def fail(self) -> None:
        """Have those that wait for something raise an error: the world has failed."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    # What all ranks do together

    def decide(
        self,
        name: str,
        mine: str,
        judge: Callable[[list[str]], str],
        patience: float = math.inf,
        waiting: Callable[[], None] | None = None,
    ) -> str:
        """Return what `judge` on rank 0 makes of the texts of all ranks; an error that it raises is raised on all.

        All ranks call this with the same new name. `waiting` is called again and again while other ranks are late.
        """
        began = time.monotonic()
        levels = max(0, 3 - self._neighbours.depth)
        until = began + patience + levels * min(_SECONDS_A_LEVEL, patience)
        ranks, lost = self._gather(name, mine, until, waiting)
        if self._rank:
            self.links.send_up({"round": name, "ranks": ranks, "lost": lost})
            return self._pass_on(name, began, patience, waiting)
        return tell_result(
            lambda: judge(self._texts(ranks, lost, patience)),
            lambda answer: self.links.send_down({"round": name, **answer}),
        )

    def tell(self, name: str, text: str | None, patience: float = math.inf) -> str:
        """Return rank 0's text on all ranks; all call this, the others with None."""
        if self._rank:
            return self._pass_on(name, time.monotonic(), patience, None)
        assert text is not None
        self.links.send_down({"round": name, "result": text})
        return text

    def tell_machine(self, name: str, text: str | None, patience: float = math.inf) -> str:
        """Return the text of a machine's first rank on all of its ranks, which call this; the others with None."""
        if self._rank != self._neighbours.here.ranks[0]:
            return self._pass_on(name, time.monotonic(), patience, None)
        assert text is not None
        self.links.send_down({"round": name, "result": text}, here=True)
        return text

    def _gather(
        self, name: str, mine: str, until: float, waiting: Callable[[], None] | None
    ) -> tuple[dict[str, list[int]], str]:
        """Return the texts of this rank and those below, with the ranks that gave each; and which of them is lost."""
        ranks, lost = {mine: [self._rank, 1]}, ""
        for link in self.links.children:
            try:
                message = self._await(name, link.rank, until, waiting)
            except TimeoutError:
                continue
            except _LinkLost:
                lost = lost or self._loss(link.rank)
                continue
            lost = lost or message["lost"]
            for text, runs in message["ranks"].items():
                ranks.setdefault(text, []).extend(runs)
        return {text: joined_runs(runs) for text, runs in ranks.items()}, lost

    def _texts(self, ranks: Mapping[str, Sequence[int]], lost: str, patience: float) -> list[str]:
        """Return the text of each rank; raise WorldMismatch if one has given none."""
        texts: list[str | None] = [None] * self._size
        for text, runs in ranks.items():
            for first, number in zip(runs[::2], runs[1::2], strict=True):
                texts[first : first + number] = [text] * number
        late = [rank for rank, text in enumerate(texts) if text is None]
        if late:
            sentence = f"rank 0 waited {patience:g} s for {name_ranks(late)}, which ended or hang"
            raise WorldMismatch(lost or sentence)
        return [text for text in texts if text is not None]

    def _pass_on(self, name: str, began: float, patience: float, waiting: Callable[[], None] | None) -> str:
        """Return what comes from the rank above, and pass it on to those below; raise the error that it may be."""
        assert self.links.parent is not None
        above = self.links.parent.rank
        try:
            answer = self._await(name, above, began + patience + _SECONDS_TO_HEAR, waiting)
        except TimeoutError:
            sentence = f"rank {self._rank} waited {patience:g} s for rank 0, which has ended or hangs"
            answer = {"round": name, "error": f"{sentence}; its log may say why", "kind": WorldMismatch.__name__}
        except _LinkLost:
            answer = {"round": name, "error": self._loss(above), "kind": WorldMismatch.__name__}
        self.links.send_down(answer)
        return result_of(answer)

    def _await(self, name: str, rank: int, until: float, waiting: Callable[[], None] | None) -> dict[str, Any]:
        """Return what a neighbour sends; raise TimeoutError, or _LinkLost if it never will."""
        key = name, rank
        while True:
            with self._changed:
                if key in self._arrived:
                    return self._arrived.pop(key)
                if self._failed:
                    raise WorldMismatch(f"rank {rank}'s part of {name!r}: connection closed by peer")
                watched = self._watch is not None and (self._watch[0], rank) not in self._over
                if rank in self._lost and not watched:  # else the watch finds the cause
                    raise _LinkLost
                if (left := until - time.monotonic()) < 0:
                    raise TimeoutError
                if waiting is not None:
                    waiting()
                self._changed.wait(min(left, _WAITING_SECONDS if waiting is not None else 1.0))

    def _loss(self, rank: int) -> str:
        """Return the sentence for a neighbour that is lost before a watch has begun."""
        if self._store.check([_FAILED_KEY]):
            return self._store.get(_FAILED_KEY).decode()
        where = "" if self.machines is None else f"{self.machines.of(rank)}, "
        return f"{where}rank {rank}, was lost before the first step: its connection was closed; its own log may say why"

    def close(self) -> None:
        """Close all links; the neighbours take this rank for lost if they still wait for it."""
        self.links.close()


def joined_runs(runs: Sequence[int]) -> list[int]:
    """Return runs of ranks, each a first one and a number, in order, with those that follow one another in one."""
    joined: list[int] = []
    for first, number in sorted(zip(runs[::2], runs[1::2], strict=True)):
        if joined and joined[-2] + joined[-1] == first:
            joined[-1] += number
        else:
            joined += [first, number]
    return joined
