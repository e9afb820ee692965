"""Settings of the C library's malloc."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Their values in <malloc.h> of glibc."""

MAPPED_FROM_BYTES: Final = 256 * 2**20
"""Blocks from this size on are given back to the system when they are freed."""

KEPT_BYTES: Final = 2**30
"""Freed memory that malloc keeps at the end of its heap."""


def keep_freed_memory() -> None:
    """Make malloc keep freed memory from now on: otherwise each step pays for new pages, 5 to 10 % of its time.

    The peak stays the same: what is kept is what the next step needs. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def is_malloc_set_by_environment() -> bool:
    """Return whether a variable of the environment says how malloc treats freed memory."""
    own = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    return any(name in os.environ for name in own) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
