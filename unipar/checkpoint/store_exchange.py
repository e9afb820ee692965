"""Messages between ranks through the world's store: a collective that a thread can use while training goes on."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import torch.distributed as dist

_PART = 2**22
"""Bytes of a value: the store takes no more than 8 MiB at once."""

_FIRST_PAUSE = 0.0002
"""Seconds between the first two looks for a message; each pause is twice the one before it, up to the longest."""


_PAUSE_FOR_EACH = 50e-6
"""Seconds by which the longest pause grows with each rank: rank 0's store answers some 100,000 looks a second."""


@final
class StoreExchange:
    """Function that gives one message to all ranks and returns those of all; each call is another round.

    Rank 0 reads the messages and writes them as one, which the others read: each rank adds a few requests, not as many
    as there are ranks. It polls: a `get` that waits would hold the store's lock, and the training loop needs the store
    for its own.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        key: str,
        waiting: Callable[[], None] = lambda: None,
        seconds: float = 0.005,
    ) -> None:
        """`key`: the same on all ranks, and new; `waiting` is called again and again while other ranks are late.

        `seconds`: the longest pause between two looks for a message.
        """
        self._store, self._rank, self._size, self._key = store, rank, size, key
        self._waiting, self._seconds = waiting, seconds
        self._round = 0
        self._sent: dict[int, list[str]] = {}

    def __call__(self, message: bytes) -> Sequence[bytes]:
        if self._size == 1 or self._store is None:
            return [message]
        self._round += 1
        if self._rank == 0:
            rows = [message, *self._read_others()]
            self._send("all", zlib.compress(json.dumps([row.decode("latin-1") for row in rows]).encode()))
        else:
            self._send(f"{self._rank}", message)
            self._await([self._name("all", "parts")])
            rows = [row.encode("latin-1") for row in json.loads(zlib.decompress(self._read("all")))]
        if self._round > 2:  # all ranks have read it: they have sent their next message since
            for key in self._sent.pop(self._round - 2, ()):
                self._store.delete_key(key)
        return rows

    def _name(self, whose: str | int, part: int | str) -> str:
        return f"{self._key}/{self._round}/{whose}/{part}"

    def _send(self, whose: str, message: bytes) -> None:
        assert self._store is not None
        parts = [message[i : i + _PART] for i in range(0, len(message), _PART)]
        keys = [self._name(whose, i) for i in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            self._store.set(key, part)  # pyright: ignore[reportArgumentType] - bytes are taken as they are
        last = self._name(whose, "parts")
        self._store.set(last, str(len(parts)))
        self._sent.setdefault(self._round, []).extend([*keys, last])

    def _await(self, keys: Sequence[str]) -> None:
        assert self._store is not None
        pause, longest = _FIRST_PAUSE, max(self._seconds, self._size * _PAUSE_FOR_EACH)
        while not self._store.check(list(keys)):
            self._waiting()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _read_others(self) -> list[bytes]:
        """Return the messages of all other ranks; most have one part, and are read in one request."""
        assert self._store is not None
        others = range(1, self._size)
        counts = [self._name(rank, "parts") for rank in others]
        self._await(counts)
        if all(count == b"1" for count in self._store.multi_get(counts)):
            return list(self._store.multi_get([self._name(rank, 0) for rank in others]))
        return [self._read(f"{rank}") for rank in others]

    def _read(self, whose: str) -> bytes:
        assert self._store is not None
        count = int(self._store.get(self._name(whose, "parts")))
        return b"".join(self._store.get(self._name(whose, i)) for i in range(count))
