"""Config section `checkpoint`: when a run saves its state, where, and what it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from unipar.config.sections.duration import parse_duration
from unipar.config.sections.section import Section
from unipar.utils.address import is_address, parse_address


def _steps_or_duration(value: int | str) -> int | str:
    if isinstance(value, str):
        parse_duration(value)
    elif value < 1:
        raise ValueError(f"{value} is no number of steps; write at least 1, or a duration such as 30m")
    return value


class Best(Section):
    """Config section `checkpoint.best`: checkpoints that are kept for their metric."""

    metric: str = "loss"
    """Name of a metric of the evaluation; it needs eval.every."""

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
    """Folder, or address such as s3://bucket/path, in which each run has a folder for its checkpoints; null:
    checkpoints/ in the run folder."""

    @field_validator("to")
    @classmethod
    def _is_a_place(cls, to: str | None) -> str | None:
        return str(parse_address(to)) if to is not None and is_address(to) else to

    on_error: Literal["stop", "warn"] = "stop"
    """Consequence of a checkpoint that cannot be written. stop: the run ends with the error; warn: it goes on."""

    frozen: Literal["auto", "reference", "copy"] = "auto"
    """Weights that are not trained. reference: saved once, in a folder beside the checkpoints, which name it by hash;
    copy: in each checkpoint; auto: reference if the model begins from model.weights or has an adapter, else copy."""

    @property
    def asynchronous(self) -> bool:
        """Value of the key `async`."""
        return getattr(self, "async")

    @property
    def seconds(self) -> float | None:
        """Seconds between checkpoints; None if steps are counted."""
        return parse_duration(self.every) if isinstance(self.every, str) else None
