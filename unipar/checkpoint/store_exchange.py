"""Messages between ranks through the world's store: a collective that a thread can use while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import torch.distributed as dist

_PART = 2**22
"""Bytes of a value: the store takes no more than 8 MiB at once."""

_FIRST_PAUSE = 0.0002
"""Seconds between the first two looks for a message; each pause is twice the one before it, up to the longest."""


@final
class StoreExchange:
    """Function that gives one message to all ranks and returns those of all; each call is another round.

    It polls: a `get` that waits would hold the store's lock, and the training loop needs the store for its own.
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
        self._sent: list[list[str]] = []

    def __call__(self, message: bytes) -> Sequence[bytes]:
        if self._size == 1 or self._store is None:
            return [message]
        self._round += 1
        self._send(message)
        if len(self._sent) > 2:  # all ranks have read it: they have sent their next message since
            for key in self._sent.pop(0):
                self._store.delete_key(key)
        return [message if rank == self._rank else self._receive(rank) for rank in range(self._size)]

    def _name(self, rank: int, part: int | str) -> str:
        return f"{self._key}/{self._round}/{rank}/{part}"

    def _send(self, message: bytes) -> None:
        assert self._store is not None
        parts = [message[i : i + _PART] for i in range(0, len(message), _PART)]
        keys = [self._name(self._rank, i) for i in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            self._store.set(key, part)  # pyright: ignore[reportArgumentType] - bytes are taken as they are
        last = self._name(self._rank, "parts")
        self._store.set(last, str(len(parts)))
        self._sent.append([*keys, last])

    def _receive(self, rank: int) -> bytes:
        assert self._store is not None
        last, pause = self._name(rank, "parts"), _FIRST_PAUSE
        while not self._store.check([last]):
            self._waiting()
            time.sleep(pause)
            pause = min(2 * pause, self._seconds)
        count = int(self._store.get(last))
        return b"".join(self._store.get(self._name(rank, i)) for i in range(count))
