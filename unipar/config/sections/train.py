"""Config section `train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from unipar.config.sections.optimizer import OPTIMIZERS, AdamW, Clip, LrScale, Optimizer
from unipar.config.sections.schedule import Constant, Schedule
from unipar.config.sections.section import Section
from unipar.config.sections.strategy import Precision
from unipar.utils.text import join_with_or


class PartTrain(Section):
    """Config section `train.parts.NAME`: settings of one part of a model that has several."""

    optimizer: Optimizer | None = None
    """Optimizer of this part; null: train.optimizer."""

    clip: PositiveFloat | Clip | None = None
    """Gradient clipping of this part; null: train.clip."""


class Watch(Section):
    """Config section `train.consistency_check`: a guard in ordinary runs."""

    every: PositiveInt = 100
    """Steps from one check to the next; the second step is also checked."""


class Ema(Section):
    """Config section `train.ema`: moving averages of the weights, with which a model is evaluated and exported."""

    decay: float = 0.999
    """Share of an average that stays at each update, above 0 and below 1; the rest comes from the weight."""

    every: int = 1
    """Optimizer steps from one update of the averages to the next."""

    warmup: NonNegativeInt = 0
    """Number by which early averages follow the weights: at the k-th update no more than k / (k + warmup) stays."""

    @field_validator("decay")
    @classmethod
    def _is_share(cls, decay: float) -> float:
        if not 0.0 < decay < 1.0:
            raise ValueError(
                f"{decay:g} is no share of an average that can stay: write a number above 0 and below 1; with 0.999 it "
                "is that of about the last 1,000 updates"
            )
        return decay

    @field_validator("every")
    @classmethod
    def _is_count(cls, every: int) -> int:
        if every < 1:
            raise ValueError(f"{every} is no number of steps: write at least 1, which updates after every step")
        return every

    def decay_at(self, update: int) -> float:
        """Return the share that stays at an update, counted from 1."""
        return min(self.decay, update / (update + self.warmup))


class Train(Section):
    """Config section `train`."""

    steps: PositiveInt | None = None
    """Optimizer steps to train for."""

    epochs: PositiveInt | None = None
    """Passes over the data to train for, instead of `steps`."""

    optimizer: Annotated[Optimizer, Field(description=f"{join_with_or([*OPTIMIZERS])}, with its own keys.")] = AdamW()

    lr_scale: LrScale = LrScale()
    """Scaling of the learning rate with the total batch."""

    schedule: Schedule = Constant()
    """constant, linear, cosine, polynomial, inverse-root, step, wsd or one-cycle; counted in optimizer steps."""

    clip: PositiveFloat | Clip | None = None
    """The largest gradient norm, or {max: 1.0, norm: fp64}."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """Answer to a norm of gradients that is NaN or infinite; the weights do not change in either case. stop:
    the run ends; skip: it goes on without this update. fp16 always skips, and lowers its loss scale."""

    parts: dict[str, PartTrain] = Field(default_factory=dict)
    """Optimizer and clip of single parts, by name, if model() returns several parts."""

    local_steps: PositiveInt | None = None
    """Steps after which parameters and moments are averaged over ranks; between two averages each rank steps by itself
    (native/nothing only). null: gradients are summed over ranks in every step."""

    ema: Ema | None = None
    """Moving averages of the trained weights. Evaluations and exports use the averages, checkpoints hold both; {}: the
    defaults below; null: none."""

    consistency_check: Watch | None = None
    """Check, every `every` steps, that copies of weights are equal and that norm, rate, samples, updates and dtypes are
    correct. The first fault ends the run with an error; {}: the defaults below; null: no check."""

    precision: Precision = "fp32"
    """Dtype of parameters and of the computation. bf16-mixed: fp32 parameters, computed in bf16; bf16-master: bf16
    parameters with fp32 masters; fp16: fp32 parameters, computed in fp16 with loss scaling (CUDA only); fp8: as
    bf16-mixed, but linear layers of blocks multiply in fp8, with one scale for each tensor; fp8-rowwise: with one for
    each row. Both are torchao's, and emulated on the CPU."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights, the order of the data and every random number."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give one of steps and epochs, not both")
        return self

    @model_validator(mode="after")
    def _same_scale(self) -> Self:
        if self.local_steps is not None and self.precision == "fp16":
            raise ValueError(
                f"local_steps ({self.local_steps}) and fp16 exclude each other: loss scaling would make each rank skip "
                "different steps; use bf16-mixed"
            )
        if self.local_steps is not None and self.nonfinite == "skip":
            raise ValueError(
                f"local_steps ({self.local_steps}) and nonfinite: skip exclude each other: each rank would skip "
                "different steps; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _same_weights(self) -> Self:
        if self.local_steps is not None and self.ema is not None:
            raise ValueError(
                f"local_steps ({self.local_steps}) and ema exclude each other: between two means each rank has its own "
                "weights, and would have its own averages; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _full_rate(self) -> Self:
        if self.steps is not None and (misfit := self.schedule.misfit(self.steps)) is not None:
            raise ValueError(misfit)
        return self

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizer and those of parts, by their keys."""
        of_parts = {f"train.parts.{name}.optimizer": part.optimizer for name, part in self.parts.items()}
        return {"train.optimizer": self.optimizer} | {key: its for key, its in of_parts.items() if its is not None}

    @property
    def narrow_moments(self) -> str | None:
        """Name of the optimizer, if it keeps moments in fewer bits than weights."""
        return next((its.name for its in self.optimizers.values() if its.full_moments is not None), None)

    @property
    def clipping(self) -> Clip | None:
        """Gradient clipping, if any."""
        return Clip(max=self.clip) if isinstance(self.clip, float | int) else self.clip
