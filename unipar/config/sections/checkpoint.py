"""Config section `checkpoint`: when a run saves its state, where, and what it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from unipar.config.sections.duration import parse_duration
from unipar.config.sections.section import Section


def _steps_or_duration(value: int | str) -> int | str:
    if isinstance(value, str):
        parse_duration(value)
    elif value < 1:
        raise ValueError(f"{value} is no number of steps; write at least 1, or a duration such as 30m")
    return value


class Best(Section):
    """Config section `checkpoint.best`: checkpoints that are kept for their metric."""

    metric: str = "loss"
    """Name of a metric of the evaluation; eval.every says when there is one."""

    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value is the best one."""

    keep: PositiveInt = 1
    """Number of best checkpoints that are kept, besides the newest ones."""


class Checkpoint(Section):
    """Config section `checkpoint`."""

    every: Annotated[int | str, AfterValidator(_steps_or_duration)] | None = None
    """Optimizer steps between checkpoints, or a duration such as 30m; null: only at the end, and when stopped."""

    keep: PositiveInt = 3
    """Number of newest checkpoints that are kept."""

    best: Best | None = None
    """Checkpoints that are kept for their metric; null: none."""

    __annotations__["async"] = "bool"  # a word of Python's own
    vars()["async"] = Field(
        default=True, description="Whether training goes on while a checkpoint is written; it waits for the copy alone."
    )

    to: str | None = None
    """Folder for checkpoints; null: checkpoints/ in the run folder."""

    @field_validator("to")
    @classmethod
    def _is_a_folder(cls, to: str | None) -> str | None:
        if to is not None and "://" in to:
            raise ValueError(
                f"to ({to}) is an address; checkpoints are saved to folders so far: name one that all ranks see"
            )
        return to

    on_error: Literal["stop", "warn"] = "stop"
    """Consequence of a checkpoint that cannot be written. stop: the run ends with the error; warn: it goes on."""

    @property
    def asynchronous(self) -> bool:
        """Value of the key `async`."""
        return getattr(self, "async")

    @property
    def seconds(self) -> float | None:
        """Seconds between checkpoints; None if steps are counted."""
        return parse_duration(self.every) if isinstance(self.every, str) else None
