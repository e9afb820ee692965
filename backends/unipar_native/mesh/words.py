"""Plans of blocks in words, and what a task says about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from unipar_native.mesh.tensor.cuts import BlockPlan


def kinds_in_block(given: Mapping[str, str], name: str, block: nn.Module) -> dict[str, str]:
    """Return what the task's tensor(model) says of a block's matrices, by their names in the block."""
    return {
        inner: kind
        for pattern, kind in given.items()
        for inner, _ in block.named_modules()
        if inner and fnmatchcase(f"{name}.{inner}", pattern)
    }


def nothing_to_split(ranks: int, plans: Iterable[BlockPlan]) -> str:
    """Return the sentence for a model none of whose matrices can be cut."""
    reasons = {f"{name}: {why}" for plan in plans for name, why in plan.whole.items()}
    shown = "; ".join(sorted(reasons)[:3])
    return (
        f"parallel.tensor: {ranks} would split nothing of this model ({shown or 'its blocks have no matrices'}): "
        "leave tensor out, or name what it can split in the task's tensor(model)"
    )
