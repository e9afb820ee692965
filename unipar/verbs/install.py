"""`unipar install NAME`: what a backend needs and `pip install` alone cannot give."""

from __future__ import annotations

import signal
import threading

from unipar.registry import find


def install(name: str, *, force: bool = False) -> str:
    """Builds and installs the library of a backend, anew with `force`; returns what was done."""
    backend = find(name)
    if threading.current_thread() is not threading.main_thread():
        return backend.install(force=force)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up as Ctrl-C does
    try:
        return backend.install(force=force)
    finally:
        signal.signal(signal.SIGTERM, before)
