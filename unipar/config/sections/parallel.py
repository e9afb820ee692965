"""Config section `parallel`, and keys that are refused by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from unipar.config.sections.cell import Shard
from unipar.config.sections.section import Section
from unipar.errors import ConfigError

UNSUPPORTED_KEYS = {
    "parallel.tensor": "tensor parallelism is not supported yet",
    "parallel.pipeline": "pipeline parallelism is not supported yet",
    "parallel.context": "context parallelism is not supported yet",
}
"""Planned keys that this version refuses, each with the reason, so that no key is ignored."""


class Parallel(Section):
    """Config section `parallel`."""

    data: PositiveInt | Literal["auto"] = "auto"
    """Ranks that train on different data. auto: the ranks that a launcher started, or one per visible GPU, or 1."""

    shard: Shard = "nothing"
    """State that those ranks split among themselves instead of each holding a copy."""

    shard_over: Annotated[int, Field(ge=2)] | None = None
    """Number of neighbouring ranks that split one copy; the other ranks hold further copies. null: all ranks."""

    def settle(self, ranks: int) -> None:
        """Raise ConfigError, which shows the arithmetic, if `shard_over` does not divide the number of ranks."""
        if self.shard_over is not None and ranks % self.shard_over:
            raise ConfigError(
                f"parallel.shard_over ({self.shard_over}) does not divide the number of ranks ({ranks}): give a "
                "divisor of it, or leave shard_over out, so that all ranks split one copy"
            )
