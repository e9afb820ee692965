"""Config section `parallel`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from unipar.config.sections.section import Section
from unipar.config.sections.strategy import SHARD_OF_WORD, Axes, PipelineSchedule, Shard, idle_words
from unipar.errors import ConfigError
from unipar.utils.text import count_of


def _shard(value: object) -> object:
    return SHARD_OF_WORD.get(value, value) if isinstance(value, str) else value


class Parallel(Section):
    """Config section `parallel`."""

    data: PositiveInt | Literal["auto"] = "auto"
    """Ranks that train on different data. auto: the ranks that a launcher started, or one per visible GPU, or 1."""

    shard: Annotated[Shard, BeforeValidator(_shard)] = "nothing"
    """State that those ranks split among themselves instead of each holding a copy. ddp, zero0 to zero3 and fsdp2 are
    taken too, for what they split."""

    shard_over: Annotated[int, Field(ge=2)] | Literal["machine"] | None = None
    """Number of neighbouring ranks that split one copy; the other ranks hold further copies. machine: the ranks of each
    machine, whatever their numbers. null: all ranks."""

    tensor: PositiveInt = 1
    """Ranks that split the matrices of each block, and train on the same samples."""

    pipeline: PositiveInt = 1
    """Ranks that have some of the blocks each, one after another, and train on the same samples."""

    context: PositiveInt = 1
    """Ranks that split each sequence, and train on the same samples."""

    expert: PositiveInt = 1
    """Ranks of `data` that hold a part of each layer's experts each, and send tokens to one another."""

    sequence: bool = False
    """Split activations between blocks along the sequence as well, over the ranks of `tensor`."""

    schedule: PipelineSchedule = "1f1b"
    """Order in which the stages of a pipeline run microbatches."""

    @property
    def axes(self) -> Axes:
        """Sizes of the mesh's axes beside the data's."""
        return Axes(
            self.tensor, self.pipeline, self.context, self.expert, sequence=self.sequence, schedule=self.schedule
        )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if (why := idle_words(self.axes)) is not None:
            raise ValueError(why)
        return self

    @property
    def ranks(self) -> int | Literal["auto"]:
        """Number of ranks in all, if `data` is a number."""
        return "auto" if self.data == "auto" else self.data * self.axes.ranks

    def settle(self, ranks: int) -> None:
        """Raise ConfigError, which shows the arithmetic, if the sizes do not divide the number of ranks."""
        data, left = divmod(ranks, self.axes.ranks)
        if not left and data % self.expert:
            raise ConfigError(
                f"parallel.expert ({self.expert}) does not divide the number of data ranks ({data}), each "
                f"{self.expert} of which hold all experts: give a divisor of it, or start a multiple of "
                f"{self.axes.fewest_ranks} ranks"
            )
        if left:
            raise ConfigError(
                f"{count_of(ranks, 'rank')} cannot be divided into {self.axes} ({self.axes.fewest_ranks} ranks each): "
                f"start a multiple of {self.axes.fewest_ranks} ranks, or change the sizes"
            )
        if isinstance(self.shard_over, int) and data % self.shard_over:
            raise ConfigError(
                f"parallel.shard_over ({self.shard_over}) does not divide the number of ranks ({data}): give a "
                "divisor of it, or leave shard_over out, so that all ranks split one copy"
            )
