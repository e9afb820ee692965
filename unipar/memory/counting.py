"""The malloc meter, in the process that preloaded it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from threading import get_native_id
from typing import Any, Final, final

import numpy as np

from unipar.backend import Category
from unipar.memory.account import Device
from unipar.memory.places import Places
from unipar.memory.replay import Mark, Seen, Site, askers

MOST: Final = 8_000_000
"""Notes that a process may make; their room is touched only as they come."""

NOTE: Final = np.dtype([(name, "i8") for name in ("address", "caller", "size", "live", "small", "thread", "asked")])


@final
class Meter:
    """In the process that preloaded it: a source of events."""

    method = "malloc, counted by a preloaded meter"
    device = "cpu"
    on: Device | None = None

    def __init__(self) -> None:
        assert self.here(), "it was not preloaded"
        self._lib = ctypes.CDLL(None)
        for name, result in (("live", "q"), ("small", "q"), ("noted", "q"), ("peak", "q"), ("note", "Q")):
            getattr(self._lib, f"unipar_meter_{name}").restype = {"q": ctypes.c_int64, "Q": ctypes.c_uint64}[result]
        self._lib.unipar_meter_note.argtypes = [ctypes.c_int64]
        self._marks: list[Mark] = []
        self._sites: list[Site] = []

    @staticmethod
    def here() -> bool:
        return hasattr(ctypes.CDLL(None), "unipar_meter_live")

    def begin(self) -> None:
        """Blocks are noted from here on."""
        os.environ.pop("LD_PRELOAD", None)  # what this process starts is not measured
        self._small = self._lib.unipar_meter_small()
        self._notes = self._lib.unipar_meter_note(MOST)
        if not self._notes:
            raise MemoryError("no addresses left for the meter's notes")
        self._lib.unipar_meter_peak()
        self._base = self._lib.unipar_meter_live()

    def mark(self, phase: str) -> None:
        lib = self._lib
        mark = Mark(self.at(), phase, lib.unipar_meter_peak(), lib.unipar_meter_live(), lib.unipar_meter_small())
        self._marks.append(mark)

    def at(self) -> int:
        """How many blocks came and went until now."""
        return self._lib.unipar_meter_noted()

    def places(self, sites: Mapping[str, Category]) -> Places:
        return Places(self.at, self._sites, sites)

    def end(self) -> None:
        self._lib.unipar_meter_end()

    @property
    def bytes(self) -> int:
        return min(self.at(), MOST) * NOTE.itemsize

    def seen(self) -> Seen:
        number = min(self.at(), MOST)
        raw: Any = (ctypes.c_char * (number * NOTE.itemsize)).from_address(self._notes)
        events = np.frombuffer(raw, dtype=NOTE).copy()
        kinds, owners = askers(events["caller"].tolist(), code())
        return Seen(
            events=events,
            kinds=kinds,
            owners=owners,
            base=self._base,
            base_small=self._small,
            thread=get_native_id(),
            marks=self._marks,
            sites=self._sites,
        )

    def index(self, at: int) -> int:
        return at

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"only the first {MOST} blocks were noted",) if self.at() >= MOST else ()


def code() -> list[tuple[int, int, str]]:
    """The files whose code this process runs: from, to, path."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        words = line.split(maxsplit=5)
        if "x" in words[1] and len(words) == 6:
            low, _, high = words[0].partition("-")
            found.append((int(low, 16), int(high, 16), words[5]))
    return found
