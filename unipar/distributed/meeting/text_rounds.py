"""Rounds of a world, in which all ranks give a text to rank 0; a thread can play them beside training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from unipar.errors import WorldMismatch, rebuild

if TYPE_CHECKING:
    import torch.distributed as dist

    from unipar.distributed.world import World

Judge = Callable[[list[str]], str]
"""Function that makes one text of those of all ranks, by rank."""

Decide = Callable[[str, Judge], str]
"""Collective: returns on all ranks what `judge` on rank 0 makes of the texts of all; its error is raised on all."""

_PART = 2**22
"""Bytes of a value: the store takes no more than 8 MiB at once."""

_FIRST_PAUSE = 0.0002
"""Seconds between the first two looks for a message; each pause is twice the one before it, up to the longest."""

_LONGEST_PAUSE = 0.005

_PAUSE_FOR_EACH = 50e-6
"""Seconds by which the longest pause grows with each rank: rank 0's store answers some 100,000 looks a second."""


def decide_alone(mine: str, judge: Judge) -> str:
    """Return what `judge` makes of the text of the only rank."""
    return judge([mine])


def result_of(texts: Mapping[str, str]) -> str:
    """Return the result that rank 0 tells; raise the error that it tells instead."""
    if "error" in texts:
        raise rebuild(texts["kind"], texts["error"]) or WorldMismatch(texts["error"])
    return texts["result"]


def tell_result(judge: Callable[[], str], tell: Callable[[dict[str, str]], object]) -> str:
    """Return what `judge` returns, and tell it as `result_of` takes it; an error that it raises is told, and raised."""
    try:
        result = judge()
    except Exception as e:
        tell({"error": str(e), "kind": type(e).__name__})
        raise
    tell({"result": result})
    return result


def open_rounds(world: World, name: str, waiting: Callable[[], None] = lambda: None) -> Decide:
    """Return a collective of all ranks, each call of which is another round.

    `name`: the same on all ranks, and new; `waiting` is called again and again while other ranks are late. On several
    machines texts go over the links between them, else through the store.
    """
    if world.size == 1 or world.store is None:
        return decide_alone
    if world.tree is None:
        return StoreRounds(world.store, world.rank, world.size, name, waiting)
    number = 0
    tree = world.tree

    def decide(mine: str, judge: Judge) -> str:
        nonlocal number
        number += 1
        return tree.decide(f"{world.launch}/{name}/{number}", mine, judge, waiting=waiting)

    return decide


@final
class StoreRounds:
    """Rounds through the world's store.

    It polls: a `get` that waits would hold the store's lock, and the training loop needs the store for its own.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str, waiting: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._rank, self._size, self._name, self._waiting = store, rank, size, name, waiting
        self._round = 0
        self._sent: dict[int, list[str]] = {}

    def __call__(self, mine: str, judge: Judge) -> str:
        self._round += 1
        if self._rank:
            self._send(f"{self._rank}", mine)
            self._await([self._key("all", "parts")])
            answer = json.loads(self._read("all"))
        else:
            judged = partial(judge, [mine, *self._read_others()])
            answer = {"result": tell_result(judged, lambda answer: self._send("all", json.dumps(answer)))}
        if self._round > 2:  # all ranks have read it: they have sent their next text since
            for key in self._sent.pop(self._round - 2, ()):
                self._store.delete_key(key)
        return result_of(answer)

    def _key(self, whose: str | int, part: int | str) -> str:
        return f"{self._name}/{self._round}/{whose}/{part}"

    def _send(self, whose: str, text: str) -> None:
        message = text.encode()
        parts = [message[i : i + _PART] for i in range(0, len(message), _PART)]
        keys = [self._key(whose, i) for i in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            self._store.set(key, part)  # pyright: ignore[reportArgumentType] - bytes are taken as they are
        last = self._key(whose, "parts")
        self._store.set(last, str(len(parts)))
        self._sent.setdefault(self._round, []).extend([*keys, last])

    def _await(self, keys: Sequence[str]) -> None:
        pause, longest = _FIRST_PAUSE, max(_LONGEST_PAUSE, self._size * _PAUSE_FOR_EACH)
        while not self._store.check(list(keys)):
            self._waiting()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _read_others(self) -> list[str]:
        """Return the texts of all other ranks; most have one part, and are read in one request."""
        others = range(1, self._size)
        counts = [self._key(rank, "parts") for rank in others]
        self._await(counts)
        if all(count == b"1" for count in self._store.multi_get(counts)):
            return [text.decode() for text in self._store.multi_get([self._key(rank, 0) for rank in others])]
        return [self._read(f"{rank}") for rank in others]

    def _read(self, whose: str) -> str:
        count = int(self._store.get(self._key(whose, "parts")))
        return b"".join(self._store.get(self._key(whose, i)) for i in range(count)).decode()
