"""How a run is split over devices, and keys that are refused by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from unipar.config.cell import Shard
from unipar.config.section import Section
from unipar.errors import ConfigError

UNSUPPORTED_KEYS = {
    "parallel.tensor": "tensor parallelism is not there yet",
    "parallel.pipeline": "pipeline parallelism is not there yet",
    "parallel.context": "context parallelism is not there yet",
}
"""Keys of the design that this version refuses by name, so that none is without effect."""


class Parallel(Section):
    data: PositiveInt | Literal["auto"] = "auto"
    """Ranks that see different data. auto: the world found, or all visible GPUs, or 1."""

    shard: Shard = "nothing"
    """What those ranks split among themselves instead of each holding a copy."""

    shard_over: Annotated[int, Field(ge=2)] | None = None
    """How many neighbouring ranks split one copy; the other ranks hold further copies. All of them without it."""

    def settle(self, ranks: int) -> None:
        """Refuse a number of ranks that copies do not fill; an error shows the arithmetic."""
        if self.shard_over is not None and ranks % self.shard_over:
            raise ConfigError(
                f"parallel.shard_over ({self.shard_over}) does not divide the number of ranks ({ranks}): give a "
                "divisor of it, or leave shard_over out, and all ranks split one copy"
            )
