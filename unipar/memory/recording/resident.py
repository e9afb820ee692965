"""Resident memory of this process as the system counts it, and malloc's settings for measuring it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from unipar.memory.account import ResidentMemory
from unipar.utils.procfs import anonymous_memory, shared_bytes

_TRIM, _MMAP = -1, -3
"""Values of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in <malloc.h>."""

_USUAL_THRESHOLD_BYTES: Final = 32 * 2**20
"""Largest M_MMAP_THRESHOLD to which malloc itself adapts when large blocks are freed."""


def keep_freed_memory() -> None:
    """Make malloc keep freed memory from now on, as it does by default after some steps: steps are timed afterwards."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP, _USUAL_THRESHOLD_BYTES)
    libc.mallopt(_TRIM, 2 * _USUAL_THRESHOLD_BYTES)


def measure_resident(base: int) -> ResidentMemory:
    """Return the peak of resident memory, and the bytes that are private to this process now."""
    rows = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    own = sum(int(line.split()[1]) for line in rows if line.startswith("Private_"))
    return ResidentMemory(base=base, peak=anonymous_memory("VmHWM") - shared_bytes(), own=own * 1024)
