"""Blocks in which little is besides their experts: what FSDP2 has as one group with what is in no block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

FEW_ELEMENTS: Final = 2**18
"""Elements up to which a group of its own costs more time of the CPU than sending them apart saves."""


def small_blocks(sizes: Mapping[str, int], experts: Collection[str]) -> frozenset[str]:
    """Return the blocks that have layers of experts, by name, and few elements besides; `sizes`: those, by block."""
    return frozenset(
        block
        for block, size in sizes.items()
        if size <= FEW_ELEMENTS and any(name.startswith(f"{block}.") for name in experts)
    )
