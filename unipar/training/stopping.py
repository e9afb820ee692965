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

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which two signals are one."""

_stop_requested_at: float | None = None
_previous_handlers: dict[int, Any] = {}
"""The handlers that were there, while ours are."""


@contextmanager
def stop_on_signals() -> Generator[None]:
    """SIGTERM and SIGINT ask this run for a stop instead of ending the process at once."""
    global _stop_requested_at
    _stop_requested_at = None
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may take signals
        return
    _previous_handlers.update(
        {number: signal.signal(number, _handle_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    )
    try:
        yield
    finally:
        for number, handler in _previous_handlers.items():
            signal.signal(number, handler)
        _previous_handlers.clear()


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """A second time, a while after the first, it means what it would mean without us."""
    global _stop_requested_at
    if (
        _stop_requested_at is not None and time.monotonic() - _stop_requested_at < SAME_SIGNAL_SECONDS
    ):  # launchers pass on what the terminal sent already
        return
    if _stop_requested_at is not None and _previous_handlers:
        for which, handler in _previous_handlers.items():
            signal.signal(which, handler)
        signal.raise_signal(number)
    _stop_requested_at = time.monotonic()


def stop_requested() -> bool:
    return _stop_requested_at is not None


def request_stop() -> None:
    """Another rank was asked: so is this one."""
    global _stop_requested_at
    _stop_requested_at = time.monotonic() if _stop_requested_at is None else _stop_requested_at


class StopAgreement:
    """Called before each step. A rank that was asked says where it stands; all stop after the largest, and one more.

    Nobody waits for anybody: a rank may be inside a collective that needs this one.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._said = False
        self._last_step: int | None = None

    def __call__(self, step: int) -> None:
        """`step` steps are done."""
        if _stop_requested_at is not None:
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
        if self._last_step is None and world.store.check(keys):
            self._last_step = max(int(world.store.get(key)) for key in keys) + 1
        if self._last_step is not None and step >= self._last_step:
            world.barrier()  # all have read it: the store may live in a rank that leaves first
            raise Stopped(f"stopped by a signal after step {step}")
