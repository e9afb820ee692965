"""The malloc meter, in the process that preloaded it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

MOST: Final = 8_000_000
"""Notes that a process may make; their room is touched only as they come."""

NOTE: Final = np.dtype([(name, "i8") for name in ("address", "caller", "size", "live", "small", "thread", "asked")])
Notes = np.ndarray[Any, Any]


class Meter:
    """In the process that preloaded it."""

    method: Final = "malloc, counted by a preloaded meter"

    def __init__(self) -> None:
        assert self.here(), "it was not preloaded"
        self._lib = ctypes.CDLL(None)
        for name, result in (("live", "q"), ("small", "q"), ("noted", "q"), ("peak", "q"), ("note", "Q")):
            getattr(self._lib, f"unipar_meter_{name}").restype = {"q": ctypes.c_int64, "Q": ctypes.c_uint64}[result]
        self._lib.unipar_meter_note.argtypes = [ctypes.c_int64]
        self._notes = 0

    @staticmethod
    def here() -> bool:
        return hasattr(ctypes.CDLL(None), "unipar_meter_live")

    def begin(self) -> int:
        """The base: what is allocated now; blocks are noted from here on."""
        os.environ.pop("LD_PRELOAD", None)  # what this process starts is not measured
        self._notes = self._lib.unipar_meter_note(MOST)
        if not self._notes:
            raise MemoryError("no addresses left for the meter's notes")
        self.peak()
        return self.live()

    def end(self) -> None:
        """For good."""
        self._lib.unipar_meter_end()

    def live(self) -> int:
        return self._lib.unipar_meter_live()

    def small(self) -> int:
        """In blocks too small to be noted."""
        return self._lib.unipar_meter_small()

    def peak(self) -> int:
        """The most since this was last asked."""
        return self._lib.unipar_meter_peak()

    def at(self) -> int:
        """How many blocks came and went until now."""
        return self._lib.unipar_meter_noted()

    @property
    def bytes(self) -> int:
        """Of the notes themselves."""
        return min(self.at(), MOST) * NOTE.itemsize

    def events(self) -> Notes:
        """All notes, in their order."""
        number = min(self.at(), MOST)
        raw: Any = (ctypes.c_char * (number * NOTE.itemsize)).from_address(self._notes)
        return np.frombuffer(raw, dtype=NOTE).copy()


def code() -> list[tuple[int, int, str]]:
    """The files whose code this process runs: from, to, path."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        words = line.split(maxsplit=5)
        if "x" in words[1] and len(words) == 6:
            low, _, high = words[0].partition("-")
            found.append((int(low, 16), int(high, 16), words[5]))
    return found
