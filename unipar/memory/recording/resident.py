"""Resident memory of this process as the system counts it."""

from __future__ import annotations

from pathlib import Path

from unipar.memory.account import ResidentMemory
from unipar.utils.procfs import anonymous_memory, shared_bytes


def measure_resident(base: int) -> ResidentMemory:
    """Return the peak of resident memory, and the bytes that are private to this process now."""
    rows = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    own = sum(int(line.split()[1]) for line in rows if line.startswith("Private_"))
    return ResidentMemory(base=base, peak=anonymous_memory("VmHWM") - shared_bytes(), own=own * 1024)
