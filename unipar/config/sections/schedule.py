"""Config sections of schedules: the learning rate's factor at each optimizer step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator
from typing_extensions import override

from unipar.config.sections.section import Section

_Share = Annotated[float, Field(ge=0, le=1)]
_PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Literal["linear", "cosine", "sqrt"]


def by_name(default: str) -> Discriminator:
    """Return the discriminator of a union of sections that are told apart by `name`."""

    def which(value: object) -> str:
        name: object = value.get("name", default) if isinstance(value, dict) else getattr(value, "name", default)
        return str(name)

    return Discriminator(which)


def remaining_share(shape: Decay, progress: float) -> float:
    """Return the share that is left of a decay from 1 to 0 after this share of its steps."""
    if shape == "linear":
        return max(0.0, 1.0 - progress)
    if shape == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return max(0.0, 1.0 - math.sqrt(progress))


def scaled_length(length: int, steps: int, of: int) -> int:
    """Return the length that has in `steps` steps the share that `length` has in `of`, rounded down, and 1 at least."""
    return max(1, length * steps // of)


class _Schedule(Section):
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = 0
    """Optimizer steps over which the learning rate rises to its full value; or their share of all: 0.1."""

    timing: Literal["own", "transformers"] = "own"
    """Begin and end of the curve. own: the first step already has a rate, and the last step has that of the end;
    transformers: as its Trainer, a warm-up begins at rate 0, and the end would be one step after the last."""

    def warmup_steps(self, steps: int) -> int:
        """Return the length of the warm-up in a run of this many optimizer steps; a share is rounded up."""
        return self.warmup if isinstance(self.warmup, int) else math.ceil(self.warmup * steps)

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate at optimizer step `step` (from 0) of `steps`."""
        return self.curve(steps)(step)

    def curve(self, steps: int) -> Callable[[int], float]:
        """Return the factor as a function of the optimizer step (from 0) alone, in a run of this many steps.

        Each step calls it: what the config says is read once.
        """
        warmup, rise, after = self.warmup_steps(steps), self._rise, self._after_warmup(steps)
        return (lambda step: rise(step, warmup) if step < warmup else after(step - warmup)) if warmup else after

    def _last(self, steps: int) -> int:
        """Return the number of steps from the end of the warm-up to the end of the run."""
        return max(1, steps - self._first - self.warmup_steps(steps))

    @property
    def _first(self) -> int:
        """Number from which steps are counted on the curve."""
        return 1 if self.timing == "own" else 0

    def _rise(self, step: int, warmup: int) -> float:
        return (step + self._first) / warmup

    @abstractmethod
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        """Return the factor as a function of the steps since the warm-up, in a run of this many steps."""

    def misfit(self, steps: int) -> str | None:
        """Return a sentence if the schedule does not fit into this many steps."""
        if self.warmup > steps:
            return (
                f"schedule.warmup ({self.warmup}) is more than steps ({steps}), so the rate would never reach its full "
                "value; give a shorter warmup (train.schedule.warmup: 0), or more steps"
            )
        return None

    def shortened(self, steps: int, of: int) -> dict[str, Any]:
        """Return lengths, by key, that are about the share of `steps` steps that these are of `of`, and 1 at least."""
        if not isinstance(self.warmup, int) or not self.warmup:
            return {}
        return {"warmup": scaled_length(self.warmup, steps, of)}


class Constant(_Schedule):
    """Config section `train.schedule` with name: constant."""

    name: Literal["constant"] = "constant"
    """The full learning rate after warm-up."""

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        return lambda since: 1.0


class Linear(_Schedule):
    """Config section `train.schedule` with name: linear."""

    name: Literal["linear"] = "linear"
    """A straight line down to `min_lr_ratio` at the last step."""

    min_lr_ratio: _Share = 0.0
    """Share of the full learning rate at the last step."""

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        end, last = self.min_lr_ratio, self._last(steps)
        return lambda since: end + (1.0 - end) * max(0.0, 1.0 - since / last)


class Cosine(_Schedule):
    """Config section `train.schedule` with name: cosine."""

    name: Literal["cosine"] = "cosine"
    """Half a cosine down to `min_lr_ratio` at the last step."""

    min_lr_ratio: _Share = 0.0
    """Share of the full learning rate at the last step."""

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        end, last = self.min_lr_ratio, self._last(steps)
        return lambda since: end + (1.0 - end) * remaining_share("cosine", since / last)


class Polynomial(_Schedule):
    """Config section `train.schedule` with name: polynomial."""

    name: Literal["polynomial"] = "polynomial"
    """A power of the remaining fraction of steps, down to `min_lr_ratio` at the last step."""

    power: PositiveFloat = 2.0
    """Exponent; 1 is a straight line."""

    min_lr_ratio: _Share = 0.0
    """Share of the full learning rate at the last step."""

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        end, power, last = self.min_lr_ratio, self.power, self._last(steps)
        return lambda since: end + (1.0 - end) * max(0.0, 1.0 - since / last) ** power


class InverseRoot(_Schedule):
    """Config section `train.schedule` with name: inverse-root."""

    name: Literal["inverse-root"] = "inverse-root"
    """sqrt(scale / (scale + steps since the warm-up))."""

    scale: PositiveInt | None = None
    """Steps after the warm-up at which the factor is sqrt(1/2); null: as many as the warm-up has, or 10,000."""

    def steps_to_half(self, steps: int) -> int:
        """Return the steps after the warm-up at which the square of the factor is 1/2, in a run of this many steps."""
        return self.scale or self.warmup_steps(steps) or 10_000

    @override
    def shortened(self, steps: int, of: int) -> dict[str, Any]:
        lengths = super().shortened(steps, of)
        return lengths if self.scale is None else {**lengths, "scale": scaled_length(self.scale, steps, of)}

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        scale = self.steps_to_half(steps)
        return lambda since: math.sqrt(scale / (since + scale))


class Steps(_Schedule):
    """Config section `train.schedule` with name: step."""

    name: Literal["step"] = "step"
    """The learning rate is multiplied by `gamma` every `every` steps, or after each of `milestones`."""

    every: PositiveInt | None = None
    """Optimizer steps from one fall of the rate to the next, counted from the run's first step."""

    milestones: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """Steps after which the rate falls, instead of `every`: [3000, 6000]."""

    gamma: _PositiveShare = 0.1
    """Factor of each fall."""

    @override
    def curve(self, steps: int) -> Callable[[int], float]:
        warmup, every, places, by = self.warmup_steps(steps), self.every, self.milestones, self.gamma

        def factor(step: int) -> float:
            falls = step // every if every is not None else sum(step >= at for at in places)
            rise = self._rise(step, warmup) if step < warmup else 1.0
            return rise * by**falls

        return factor

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        raise AssertionError("curve() counts falls from the first step")

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if (self.every is None) == (not self.milestones):
            raise ValueError("schedule step needs one of every (steps between falls) and milestones (a list of steps)")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones must be ascending, each step once; got {list(self.milestones)}")
        return self

    @override
    def misfit(self, steps: int) -> str | None:
        if self.milestones and self.milestones[-1] >= steps:
            return (
                f"schedule.milestones: the rate would fall after step {self.milestones[-1]}, and there are {steps} "
                "steps; leave that one out, or give more steps"
            )
        if self.every is not None and self.every >= steps:
            return (
                f"schedule.every ({self.every}) is not less than steps ({steps}), so the rate would never fall; give a "
                "smaller one, or schedule.name: constant"
            )
        return super().misfit(steps)

    @override
    def shortened(self, steps: int, of: int) -> dict[str, Any]:
        lengths = super().shortened(steps, of)
        if self.every is not None:
            return {**lengths, "every": min(scaled_length(self.every, steps, of), max(1, steps - 1))}
        return {
            **lengths,
            "milestones": sorted({at for at in (scaled_length(at, steps, of) for at in self.milestones) if at < steps}),
        }


class WarmupStableDecay(_Schedule):
    """Config section `train.schedule` with name: wsd (warm-up, stable, decay)."""

    name: Literal["wsd"] = "wsd"
    """The full learning rate after warm-up, and a decay over the last steps."""

    decay: PositiveInt
    """Optimizer steps at the end over which the rate falls."""

    shape: Decay = "linear"
    """Curve of the decay: linear, cosine, or sqrt (one minus the root of its progress)."""

    min_lr_ratio: _Share = 0.0
    """Share of the full learning rate at the last step."""

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        decay, shape, end, last = self.decay, self.shape, self.min_lr_ratio, self._last(steps)

        def fall(since: int) -> float:
            progress = max(0.0, (since - last + decay) / decay)
            return end + (1.0 - end) * remaining_share(shape, progress)

        return fall

    @override
    def _rise(self, step: int, warmup: int) -> float:
        rise = super()._rise(step, warmup)
        return rise if self.timing == "own" else self.min_lr_ratio + (1.0 - self.min_lr_ratio) * rise

    @override
    def misfit(self, steps: int) -> str | None:
        if (warmup := self.warmup_steps(steps)) + self.decay > steps:
            return (
                f"schedule.warmup ({warmup}) and schedule.decay ({self.decay}) are more than steps ({steps}) "
                "together; give fewer steps of each, or more steps"
            )
        return None

    @override
    def shortened(self, steps: int, of: int) -> dict[str, Any]:
        lengths = super().shortened(steps, of)
        share = 0 if lengths else self.warmup_steps(steps)
        decay = min(scaled_length(self.decay, steps, of), max(1, steps - share))
        warmup = {key: min(length, steps - decay) for key, length in lengths.items()}
        return {**warmup, "decay": decay}


class OneCycle(_Schedule):
    """Config section `train.schedule` with name: one-cycle."""

    name: Literal["one-cycle"] = "one-cycle"
    """A rise from `begin` to the full learning rate, then a fall to `min_lr_ratio`; momentum does not change."""

    pct_start: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the steps in which the rate rises."""

    begin: _PositiveShare = 0.04
    """Share of the full learning rate at the first step."""

    min_lr_ratio: _Share = 4e-6
    """Share of the full learning rate at the last step."""

    shape: Literal["linear", "cosine"] = "cosine"
    """Curve of rise and fall."""

    @override
    def _after_warmup(self, steps: int) -> Callable[[int], float]:
        begin, end, shape, last = self.begin, self.min_lr_ratio, self.shape, self._last(steps)
        top = self.pct_start * (last + 1) - 1.0

        def factor(since: int) -> float:
            if since <= top:
                return 1.0 - (1.0 - begin) * remaining_share(shape, since / top)
            return end + (1.0 - end) * remaining_share(shape, (since - top) / (last - top))

        return factor

    @model_validator(mode="after")
    def _rises_by_itself(self) -> Self:
        if self.warmup:
            raise ValueError(
                f"warmup ({self.warmup}) and one-cycle exclude each other: it rises by itself, over the share "
                "`pct_start` of the steps; leave warmup out"
            )
        if self.timing != "own":
            raise ValueError(f"timing ({self.timing}) and one-cycle exclude each other: leave timing out")
        return self

    @override
    def misfit(self, steps: int) -> str | None:
        if self.pct_start * steps < 2:
            return (
                f"schedule.pct_start ({self.pct_start:g}) is less than 2 of {steps} steps, in which the rate would "
                "rise; give a larger share, or more steps"
            )
        return None

    @override
    def shortened(self, steps: int, of: int) -> dict[str, Any]:
        return {"pct_start": min(0.99, math.ceil(200 / steps) / 100)}  # two steps of these


Schedule = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[Polynomial, Tag("polynomial")]
    | Annotated[InverseRoot, Tag("inverse-root")]
    | Annotated[Steps, Tag("step")]
    | Annotated[WarmupStableDecay, Tag("wsd")]
    | Annotated[OneCycle, Tag("one-cycle")],
    by_name("constant"),
]
