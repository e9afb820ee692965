"""What the system counts for this process, while malloc gives back what is freed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from unipar.memory.account import ResidentMemory
from unipar.utils.procfs import anonymous_memory

_TRIM, _MMAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>."""

_USUAL_THRESHOLD_BYTES: Final = 32 * 2**20
"""Up to where malloc raises that by itself, as it sees larger blocks go."""


def keep_freed_memory() -> None:
    """From here on malloc keeps what is freed, as it does by itself after some steps: else they would be slower."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP, _USUAL_THRESHOLD_BYTES)
    libc.mallopt(_TRIM, 2 * _USUAL_THRESHOLD_BYTES)


def measure_resident(base: int) -> ResidentMemory:
    """After a step: its peak, and what is this process's own now."""
    rows = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    own = sum(int(line.split()[1]) for line in rows if line.startswith("Private_"))
    return ResidentMemory(base=base, peak=anonymous_memory("VmHWM"), own=own * 1024)
