"""`Train` and settings of one part."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from unipar.config.cell import Precision
from unipar.config.section import Section
from unipar.config.sections.optimizer import AdamW, Clip, Constant, LrScale, Optimizer, Schedule


class PartTrain(Section):
    """train.parts.NAME: what one of several parts has of its own."""

    optimizer: Optimizer | None = None
    """Instead of train.optimizer."""

    clip: PositiveFloat | Clip | None = None
    """Instead of train.clip."""


class Train(Section):
    steps: PositiveInt | None = None
    """Optimizer steps to train for."""

    epochs: PositiveInt | None = None
    """Or passes over the data."""

    optimizer: Optimizer = AdamW()
    """sgd, adam or adamw, with its own keys."""

    lr_scale: LrScale = LrScale()
    """How the rate follows the total batch."""

    schedule: Schedule = Constant()
    """constant, linear or cosine; counted in optimizer steps, everywhere."""

    clip: PositiveFloat | Clip | None = None
    """The largest gradient norm, or {max: 1.0, norm: fp64}."""

    parts: dict[str, PartTrain] = Field(default_factory=dict)
    """Where model() returns several parts: by name, an optimizer and a clip of their own."""

    sync_every: PositiveInt | None = None
    """Each rank steps by itself, and every so many steps all take their mean; gradients are summed at every step
    without it."""

    precision: Precision = "fp32"
    """bf16-mixed computes in bf16 on fp32 parameters; bf16-master keeps bf16 parameters with fp32 masters."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Initial weights, the order of the data and every random draw follow from it."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("one of steps and epochs is needed, and not both")
        return self

    @model_validator(mode="after")
    def _same_scale(self) -> Self:
        if self.sync_every is not None and self.precision == "fp16":
            raise ValueError(
                f"sync_every ({self.sync_every}) and fp16 exclude each other: each rank would leave out other steps; "
                "use bf16-mixed"
            )
        return self

    @model_validator(mode="after")
    def _full_rate(self) -> Self:
        warmup = self.schedule.warmup
        if self.steps is not None and warmup > self.steps:
            raise ValueError(
                f"schedule.warmup ({warmup}) is more than steps ({self.steps}), so the rate would never reach its full "
                "value; give a shorter warmup (train.schedule.warmup: 0), or more steps"
            )
        return self

    @property
    def clipping(self) -> Clip | None:
        return Clip(max=self.clip) if isinstance(self.clip, float | int) else self.clip
