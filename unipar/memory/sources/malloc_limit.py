"""Limit on what malloc gives to this process, which the preloaded meter enforces: an allocation beyond it fails."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, Literal

from unipar.memory.sources.malloc_meter import MallocMeter, list_code_ranges

_NO_LIMIT: Final = 2**63 - 1

LIBRARIES_OF_TENSORS: Final = {"libc10.so": 0, "libstdc++.so": 4096}
"""Libraries that ask for tensors, and for the copies that gloo makes of them, by the beginnings of their names; and
the size from which their blocks count: smaller ones of C++ are objects."""

CountedAllocations = Literal["all", "tensors"]
"""Allocations that count toward a limit: all that malloc gives; or what `unipar plan` predicts, by the bytes asked for:
tensors and gloo's copies, without what Python, MKL and other libraries hold for themselves."""


class _Limit:
    """Limit of this process; there is at most one."""

    most: int | None = None
    """Value of the counter that must not be exceeded; None without a limit."""

    counter = "live"
    """Counter of the meter: live or marked."""

    begin = 0
    """Value of the counter when the limit was set, moved by what did not count."""

    @classmethod
    def now(cls) -> int:
        return getattr(_meter(), f"unipar_meter_{cls.counter}")()


def limit_allocations(size: int, counted: CountedAllocations = "all") -> None:
    """Let this process allocate at most `size` bytes beyond those that it has allocated now; called once.

    On all threads. A block of 4 KiB or more that would exceed the limit is refused: torch raises "can't allocate
    memory". Smaller ones count, and are not refused. The meter must be preloaded. Processes that this one starts or
    forks later have no limit.
    """
    assert _Limit.most is None, "there is a limit already"
    lib = _meter()
    os.environ.pop("LD_PRELOAD", None)
    os.register_at_fork(after_in_child=lambda: lib.unipar_meter_limit(_NO_LIMIT))
    if counted == "tensors":
        for low, high, path in list_code_ranges():
            for name, shortest in LIBRARIES_OF_TENSORS.items():
                if path.rpartition("/")[2].startswith(name):
                    assert lib.unipar_meter_mark(low, high, shortest), "too many libraries"
        _Limit.counter = "marked"
    lib.unipar_meter_peak()
    _Limit.begin = _Limit.now()
    _Limit.most = _Limit.begin + size
    lib.unipar_meter_limit(_Limit.most)


@contextmanager
def uncounted_allocations() -> Generator[None]:
    """Context manager: what the body allocates, and keeps, does not count toward the limit, if there is one."""
    if _Limit.most is None:
        yield
        return
    lib, before = _meter(), _Limit.now()
    lib.unipar_meter_limit(_NO_LIMIT)
    try:
        yield
    finally:
        kept = _Limit.now() - before
        _Limit.begin += kept
        _Limit.most += kept
        lib.unipar_meter_limit(_Limit.most)
        lib.unipar_meter_peak()


def allocations_left() -> int | None:
    """Return the bytes that this process may still allocate; None without a limit."""
    return None if _Limit.most is None else max(0, _Limit.most - _Limit.now())


def peak_of_allocations() -> int:
    """Return the most bytes of all allocations since the limit was set or this was last asked, beyond that moment."""
    assert _Limit.counter == "live", "the peak is that of all allocations"
    return _meter().unipar_meter_peak() - _Limit.begin


def _meter() -> Any:
    assert MallocMeter.here(), "the meter was not preloaded"
    lib = ctypes.CDLL(None)
    for name in ("live", "marked", "peak"):
        getattr(lib, f"unipar_meter_{name}").restype = ctypes.c_int64
    lib.unipar_meter_limit.argtypes = [ctypes.c_int64]
    lib.unipar_meter_mark.argtypes = [ctypes.c_uint64] * 3
    return lib
