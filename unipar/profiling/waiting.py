"""Time that a step spends in communication that is not hidden behind computing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, final

_SCHEDULING: Final = Path("/proc/thread-self/schedstat")
"""File of Linux: nanoseconds that this thread has run, and that it has waited for a processor."""

SLEEP_METHOD: Final = "the time for which the thread that trains sleeps in a step, as Linux counts it"
KERNEL_METHOD: Final = "the time for which kernels of NCCL run and no other kernel does, by torch's profiler"


@final
class SleepClock:
    """Clock of the seconds for which the calling thread slept; while it runs or waits for a processor, it stands.

    A thread that waits for a collective of gloo, or for Horovod's, sleeps.
    """

    def __init__(self) -> None:
        """Open the system's counter for the calling thread; raise OSError if there is none."""
        self._file = os.open(_SCHEDULING, os.O_RDONLY)
        self._began = 0.0
        self.seconds = 0.0
        """Seconds between `start` and `stop`, added up."""

        try:
            self._now()
        except (OSError, ValueError, IndexError):
            os.close(self._file)
            raise OSError("no counter") from None

    def start(self) -> None:
        """Begin to count."""
        self._began = self._now()

    def stop(self) -> None:
        """End what `start` began."""
        self.seconds += max(self._now() - self._began, 0.0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _now(self) -> float:
        """Return the time without that for which the thread ran, or was ready to."""
        ready = int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        return time.perf_counter() - time.thread_time() - ready


def seconds_not_hidden(kernels: Iterable[tuple[str, float, float]]) -> float | None:
    """Return for how long kernels of NCCL ran without any other one, or None if there were none of NCCL.

    `kernels`: name, begin and end in seconds of each.
    """
    listed = list(kernels)
    sent = [(low, high) for name, low, high in listed if "nccl" in name.lower()]
    if not sent:
        return None
    computed = [(low, high) for name, low, high in listed if "nccl" not in name.lower()]
    return _length(sent + computed) - _length(computed)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, until = 0.0, float("-inf")
    for low, high in sorted(spans):
        total += max(0.0, high - max(low, until))
        until = max(until, high)
    return total
