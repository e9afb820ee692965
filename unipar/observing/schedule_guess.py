"""Guess at the schedule of a script from the rates that it had: a schedule of unipar that gives the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from unipar.config.sections.schedule import Constant, Schedule
from unipar.results.observed_recipe import SeenSchedule

_EQUAL: Final = 1e-9
"""Relative difference up to which two rates are equal."""

_SCHEDULE: Final[TypeAdapter[Any]] = TypeAdapter(Schedule)
_HINTS: Final[Mapping[str, str]] = {
    "onecycle": "one-cycle",
    "cosine": "cosine",
    "polynomial": "polynomial",
    "inverse": "inverse-root",
    "wsd": "wsd",
    "multistep": "step",
    "steplr": "step",
    "exponential": "step",
    "constant": "constant",
    "linear": "linear",
}
"""unipar's name of a schedule, by a part of the name of a class or function."""

_NAMES: Final = ("constant", "linear", "cosine", "polynomial", "inverse-root", "step", "wsd", "one-cycle")


@dataclass(frozen=True)
class ScheduleGuess:
    """Schedule of unipar that gives the rates that were seen."""

    settings: Mapping[str, Any]
    """Keys of `train.schedule`."""

    rate: float
    """Full learning rate."""

    steps: int
    """Number of steps of the run in which it does."""

    others: tuple[str, ...] = ()
    """Names of further schedules that give the same rates."""

    hinted: bool = False
    """Whether the script's schedule has the same name."""


def guess_schedule(
    rates: Mapping[int, float], rate: float, seen: Sequence[SeenSchedule], steps: int
) -> ScheduleGuess | None:
    """Return the schedule that gives these rates, by step from 1, or None if none does.

    `rate`: that with which the optimizer was made; `steps`: number of steps taken.
    """
    numbers: dict[str, float] = {}
    for schedule in seen:
        numbers |= schedule.numbers
    words = " ".join([s.name for s in seen] + [f for s in seen for f in s.functions]).lower()
    hints = list(dict.fromkeys(name for word, name in _HINTS.items() if word in words))
    tops = dict.fromkeys([numbers.get("max_lr", rate), rate, max(rates.values(), default=rate)])
    for top in tops:
        if not top:
            continue
        factors = {step - 1: value / top for step, value in rates.items()}
        fitting: dict[str, ScheduleGuess] = {}
        names = [*hints, *(name for name in _NAMES if name not in hints)]
        for name in names:
            found = next(_fitting(name, factors, numbers, steps), None)
            if found is not None:
                fitting[name] = ScheduleGuess(found[0], top, found[1])
        if fitting:
            first = next(iter(fitting))
            others = () if first == "constant" and not fitting[first].settings.get("warmup") else tuple(fitting)[1:]
            guess = fitting[first]
            return ScheduleGuess(guess.settings, top, guess.steps, others, hinted=first in hints)
    return None


def _fitting(
    name: str, factors: Mapping[int, float], numbers: Mapping[str, float], steps: int
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield settings of a schedule, with a number of steps, under which it gives these factors, by step from 0.

    Numbers of steps that were taken, or that the script says, come first, and of these the largest.
    """
    tried = [
        (given, total)
        for settings in _settings_of(name, factors, numbers)
        for timing in (("own",) if name == "one-cycle" else ("own", "transformers"))
        for given in [settings | ({} if timing == "own" else {"timing": timing})]
        for total in _totals(name, given, factors, numbers, steps)
        if total > max(factors, default=0)
    ]
    told = {steps: 0} | {int(number): 1 for number in numbers.values() if number == int(number) != steps}
    likely = _likely_ends(numbers)

    def less_likely(candidate: tuple[dict[str, Any], int]) -> tuple[bool, int, int]:
        return candidate[0].get("min_lr_ratio", 0.0) not in likely, told.get(candidate[1], 2), -candidate[1]

    for given, total in sorted(tried, key=less_likely):
        try:
            schedule = _SCHEDULE.validate_python({"name": name, **given})
        except ValidationError:
            continue
        curve = schedule.curve(total)
        if schedule.misfit(total) is None and all(
            math.isclose(curve(at), f, rel_tol=_EQUAL, abs_tol=1e-12) for at, f in factors.items()
        ):
            yield {"name": name, **given}, total


def _settings_of(name: str, factors: Mapping[int, float], numbers: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the settings that a schedule may have."""
    if name == "one-cycle":
        yield from _one_cycles(numbers)
        return
    for warmup in _warmups(factors, numbers):
        begin: dict[str, Any] = {"warmup": warmup} if warmup else {}
        if name == "step":
            yield from ({**begin, **falls} for falls in _falls(factors, numbers))
        elif name == "inverse-root":
            scales = {int(numbers[key]) for key in ("timescale",) if key in numbers}
            yield from (begin, *({**begin, "scale": scale} for scale in scales))
        elif name == "constant":
            yield begin
        else:
            for end in dict.fromkeys([*_likely_ends(numbers), min(factors.values(), default=0.0)]):
                settings = {**begin, **({"min_lr_ratio": end} if end else {})}
                if name == "polynomial":
                    yield {**settings, "power": numbers.get("power", 2.0)}
                elif name == "wsd":
                    lengths = [int(numbers[k]) for k in ("num_decay_steps",) if numbers.get(k)]
                    shapes = ("linear", "cosine", "sqrt")
                    yield from ({**settings, "decay": d, "shape": shape} for d in lengths for shape in shapes)
                else:
                    yield settings


def _warmups(factors: Mapping[int, float], numbers: Mapping[str, float]) -> list[int]:
    """Return possible lengths of the warm-up: those that the script's schedule says, and that of the rates' rise."""
    found = [0, *(int(v) for k, v in numbers.items() if v == int(v) and 0 < v < 1e7 and "decay" not in k)]
    rise = [(at, f) for at, f in factors.items() if 0 < f < 1]
    if rise:
        at, f = rise[0]
        found += [round((at + 1) / f), round(at / f)]
    return [length for length in dict.fromkeys(found) if length >= 0]


def _likely_ends(numbers: Mapping[str, float]) -> list[float]:
    """Return shares of the rate at the end that the script says, or that are usual."""
    top = numbers.get("base_lr", 0.0)
    told = [numbers[key] for key in ("min_lr_rate", "min_lr_ratio", "end_factor") if key in numbers]
    told += [numbers[key] / top for key in ("eta_min", "lr_end", "min_lr") if top and key in numbers]
    return list(dict.fromkeys([*(end for end in told if 0 <= end <= 1), 0.0, 0.1]))


def _falls(factors: Mapping[int, float], numbers: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    gamma = numbers.get("gamma") or next((f for f in factors.values() if 0 < f < 1), None)
    if gamma is None or not 0 < gamma < 1:
        return
    milestones = [int(v) for k, v in numbers.items() if k.startswith("milestones")]
    if milestones:
        yield {"milestones": milestones, "gamma": gamma}
    fall = next((at for at, f in factors.items() if f < 1), 1)
    for every in dict.fromkeys([int(numbers.get("step_size", 0)), fall]):
        if every > 0:
            yield {"every": every, "gamma": gamma}


def _one_cycles(numbers: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    if not {"max_lr", "base_lr", "min_lr"} <= numbers.keys() or not numbers["max_lr"]:
        return
    begin, end = numbers["base_lr"] / numbers["max_lr"], numbers["min_lr"] / numbers["max_lr"]
    share = (numbers.get("end_step", 0.0) + 1.0) / max(1.0, numbers.get("total_steps", 0.0))
    for shape in ("cosine", "linear"):
        yield {"pct_start": share, "begin": begin, "min_lr_ratio": end, "shape": shape}


def _totals(
    name: str,
    settings: Mapping[str, Any],
    factors: Mapping[int, float],
    numbers: Mapping[str, float],
    steps: int,
) -> list[int]:
    """Return possible numbers of steps of the run."""
    warmup, end = int(settings.get("warmup", 0)), float(settings.get("min_lr_ratio", 0.0))
    if name in ("constant", "step", "inverse-root"):
        return [max(steps, warmup)]
    found = [int(v) + more for v in numbers.values() if 1 < v < 1e8 and v == int(v) for more in (0, 1, warmup)]
    first = 1 if settings.get("timing", "own") == "own" else 0
    falls = [(at, (f - end) / (1.0 - end)) for at, f in factors.items() if at > warmup and end < f < 1.0 and end < 1.0]
    if falls:
        at, left = falls[-1]
        last = (at - warmup) / (1.0 - left) if name != "cosine" else (at - warmup) * math.pi / math.acos(2 * left - 1)
        found.append(round(last) + first + warmup)
    return list(dict.fromkeys([*found, steps]))


def is_constant(guess: ScheduleGuess) -> bool:
    """Return whether a guess is the schedule that a config has without saying so."""
    return guess.settings == {"name": Constant().name}
