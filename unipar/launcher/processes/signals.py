"""SIGINT, SIGTERM and SIGUSR1, received by a parent that waits for its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from unipar.training.stopping import STOP_SIGNALS

STACK_SIGNAL = signal.SIGUSR2
"""Signal by which a worker is asked to write its Python stack."""


class SignalReceiver:
    """Context manager: records signals instead of ending this process; only in the main thread."""

    def __init__(self) -> None:
        self.received_signals: list[signal.Signals] = []
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has been received."""
        return self._reader

    def drain(self) -> None:
        """Make the descriptor unreadable until the next signal."""
        with suppress(BlockingIOError):
            os.read(self._reader, 64)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received_signals.append(signal.Signals(number))
        os.write(self._writer, b"!")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # under nohup signals are ignored, and stay ignored
                    self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)


@contextmanager
def sigterm_as_interrupt() -> Generator[None]:
    """Context manager: SIGTERM raises KeyboardInterrupt in the body, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
