"""Config section `train`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from unipar.config.sections.cell import Precision
from unipar.config.sections.optimizer import AdamW, Clip, LrScale, Optimizer
from unipar.config.sections.schedule import Constant, Schedule
from unipar.config.sections.section import Section


class PartTrain(Section):
    """Config section `train.parts.NAME`: settings of one part of a model that has several."""

    optimizer: Optimizer | None = None
    """Optimizer of this part; null: train.optimizer."""

    clip: PositiveFloat | Clip | None = None
    """Gradient clipping of this part; null: train.clip."""


class Watch(Section):
    """Config section `train.watch`: a guard in ordinary runs."""

    every: PositiveInt = 100
    """Steps from one check to the next; the second step is checked too."""


class Train(Section):
    """Config section `train`."""

    steps: PositiveInt | None = None
    """Optimizer steps to train for."""

    epochs: PositiveInt | None = None
    """Passes over the data to train for, instead of `steps`."""

    optimizer: Optimizer = AdamW()
    """sgd, adam or adamw, with its own keys."""

    lr_scale: LrScale = LrScale()
    """Scaling of the learning rate with the total batch."""

    schedule: Schedule = Constant()
    """constant, linear, cosine, polynomial, step, wsd or one-cycle; counted in optimizer steps in every backend."""

    clip: PositiveFloat | Clip | None = None
    """The largest gradient norm, or {max: 1.0, norm: fp64}."""

    parts: dict[str, PartTrain] = Field(default_factory=dict)
    """Optimizer and clip of single parts, by name, if model() returns several parts."""

    sync_every: PositiveInt | None = None
    """Steps after which parameters and moments are averaged over ranks, each of which steps by itself in between;
    null: gradients are summed over ranks in every step."""

    watch: Watch | None = None
    """Check in one step of every so many that copies of weights are equal, and norm, rate, samples, updates and dtypes
    are what they should be; the first fault ends the run with a sentence."""

    precision: Precision = "fp32"
    """bf16-mixed computes in bf16 on fp32 parameters; bf16-master keeps bf16 parameters with fp32 masters."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights, the order of the data and every random number."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give one of steps and epochs, not both")
        return self

    @model_validator(mode="after")
    def _same_scale(self) -> Self:
        if self.sync_every is not None and self.precision == "fp16":
            raise ValueError(
                f"sync_every ({self.sync_every}) and fp16 exclude each other: loss scaling would make each rank skip "
                "different steps; use bf16-mixed"
            )
        return self

    @model_validator(mode="after")
    def _full_rate(self) -> Self:
        if self.steps is not None and (misfit := self.schedule.misfit(self.steps)) is not None:
            raise ValueError(misfit)
        return self

    @property
    def clipping(self) -> Clip | None:
        """Gradient clipping, if any."""
        return Clip(max=self.clip) if isinstance(self.clip, float | int) else self.clip
