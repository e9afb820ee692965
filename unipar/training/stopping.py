"""Stopping on a signal: every rank at the same step boundary."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from unipar.errors import Stopped

if TYPE_CHECKING:
    from unipar.distributed.world import World

SAME = 1.0
"""Seconds within which two signals are one."""

_asked: float | None = None
_before: dict[int, Any] = {}
"""The handlers that were there, while ours are."""


@contextmanager
def listening() -> Generator[None]:
    """SIGTERM and SIGINT ask this run for a stop instead of ending the process at once."""
    global _asked
    _asked = None
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may take signals
        return
    _before.update({number: signal.signal(number, _ask) for number in (signal.SIGTERM, signal.SIGINT)})
    try:
        yield
    finally:
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()


def _ask(number: int, frame: FrameType | None) -> None:
    """A second time, a while after the first, it means what it would mean without us."""
    global _asked
    if _asked is not None and time.monotonic() - _asked < SAME:  # launchers pass on what the terminal sent already
        return
    if _asked is not None and _before:
        for which, handler in _before.items():
            signal.signal(which, handler)
        signal.raise_signal(number)
    _asked = time.monotonic()


def asked() -> bool:
    return _asked is not None


def ask() -> None:
    """Another rank was asked: so is this one."""
    global _asked
    _asked = time.monotonic() if _asked is None else _asked


class Boundary:
    """Called before each step. A rank that was asked says where it stands; all stop after the largest, and one more.

    Nobody waits for anybody: a rank may be inside a collective that needs this one.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._said = False
        self._last: int | None = None

    def __call__(self, step: int) -> None:
        """`step` steps are done."""
        if _asked is not None:
            self._agree(step)

    def _agree(self, step: int) -> None:
        world = self._world
        if world.size == 1 or world.store is None:
            raise Stopped(f"stopped by a signal after step {step}")
        keys = [f"stop/{rank}" for rank in range(world.size)]
        if not self._said:
            self._said = True
            if world.device.type == "cuda":
                world.synchronize()  # the device may be steps behind
            world.store.set(keys[world.rank], str(step))
        if self._last is None and world.store.check(keys):
            self._last = max(int(world.store.get(key)) for key in keys) + 1
        if self._last is not None and step >= self._last:
            world.barrier()  # all have read it: the store may live in a rank that leaves first
            raise Stopped(f"stopped by a signal after step {step}")
