"""`RecomputeChoice`: blocks that `model.recompute: {fit: ...}` recomputes, as a plan has chosen them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unipar.utils.text import count_of, format_size

Recompute = Literal["none", "blocks"] | tuple[str, ...]
"""Blocks that are recomputed: none, all, or those with these names."""


@dataclass(frozen=True)
class RecomputeChoice:
    """Blocks that are recomputed, and what a rank needs by the plan."""

    names: tuple[str, ...]
    """Names of the blocks, the first of the model's."""

    of: int
    """Number of the model's blocks."""

    fit: int
    needed: int
    """Bytes of the fullest rank with these blocks recomputed."""

    unrecomputed: int
    """Bytes with none."""

    @property
    def recompute(self) -> Recompute:
        """The same as a value of `model.recompute`."""
        return self.names or "none"

    @property
    def says(self) -> str:
        """Sentence for the run log and `unipar explain`."""
        planned = f"{format_size(self.needed)} of {format_size(self.fit)} by the plan"
        if not self.names:
            return f"no block recomputed: {planned}"
        which = self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"
        return (
            f"{len(self.names)} of {count_of(self.of, 'block')} recomputed ({which}): {planned}, "
            f"{format_size(self.unrecomputed)} with none"
        )
