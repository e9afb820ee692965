"""A cell held to one process: each thing that was measured, beside what it may be off."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from unipar.verification.judgement.record import RankBatches, RunRecord, SketchVector, StateKey, tensor_distance
from unipar.verification.judgement.tolerance import NOISE_GRADIENT_SHARE, Tolerance, gradient_share

SKETCH_FACTOR = 4.0
"""A sketch tells a length to a factor of two or so: it names the place, and is no verdict by itself."""

FP64_TOLERANCE = 1e-9
"""Rates and weights are computed on the CPU, in fp64."""


@dataclass(frozen=True)
class Measurement:
    """One thing, in one step or at the end."""

    what: str
    """samples, sample weight, loss, norm, ranks' norms, rate, or a kind of state."""

    step: int
    off: float
    allowed: float
    name: str = ""
    """Of the parameter."""

    @property
    def share(self) -> float:
        """Of what is allowed."""
        if self.off == 0:
            return 0.0
        return math.inf if math.isnan(self.off) or self.allowed == 0 else self.off / self.allowed

    @property
    def says(self) -> str:
        where = f" of {self.name}" if self.name else ""
        place = f"{self.what}{where} at step {self.step}"
        if self.what == "samples":
            return f"{place}: {self.off:.0f} microbatches too many or too few" if self.off else f"{place} are the same"
        if math.isnan(self.off):
            return f"{place} is not there, or not a number"
        allowed = f"{self.allowed:.1e}" if self.allowed else "nothing"
        return f"{place} is off by {self.off:.1e}, {allowed} is allowed"


@dataclass(frozen=True)
class Judgement:
    """What came of it."""

    worst: Measurement
    first: Measurement | None
    """The first that is off by more than is allowed, in the order in which things happen; None: nothing is."""

    differing: tuple[StateKey, ...] = ()
    """Tensors that part in the step of `first`, in the model's order."""

    @property
    def agrees(self) -> bool:
        return self.first is None


def judge(run: RunRecord, allowance: Tolerance, replay: RunRecord) -> Judgement:
    """The verdict counts series and the state at the end; sketches say where it began."""
    series = [m for t in range(run.steps) for m in _measure_step(run, allowance, replay, t)]
    end = list(_measure_final_state(run, allowance))
    worst = max([*series, *end], key=lambda m: m.share)
    if worst.share <= 1.0:
        return Judgement(worst, None)
    for t in range(run.steps):
        for measure in series:
            if measure.step == t + 1 and measure.share > 1.0:
                return Judgement(worst, measure, differing_tensors(run, allowance, t + 1))
        if gone := differing_tensors(run, allowance, t + 1):
            off, allowed = _measure_sketch(run, allowance, gone[0], t + 1)
            return Judgement(worst, Measurement(gone[0][1], t + 1, off, allowed, gone[0][0]), gone)
    return Judgement(worst, worst, tuple((m.name, m.what) for m in end if m.share > 1.0))


def _measure_step(run: RunRecord, allowance: Tolerance, replay: RunRecord, t: int) -> Iterator[Measurement]:
    base, step = allowance.base, t + 1
    yield Measurement("samples", step, float(_count_wrong_batches(run.batches[t], replay.batches[t])), 0.0)
    yield Measurement("sample weight", step, abs(sum(rank.weight for rank in run.batches[t]) - 1.0), FP64_TOLERANCE)
    yield Measurement("loss", step, abs(run.losses[t] - base.losses[t]), allowance.losses[t])
    norm = base.norms[t][0]
    mine = run.norms[t]
    yield Measurement("ranks' norms", step, max(mine) - min(mine), allowance.norms[t])
    yield Measurement("norm", step, max((abs(n - norm) for n in mine), key=_nan_as_infinity), allowance.norms[t])
    for rank in run.rates[t]:
        for own, wanted in zip(rank, base.rates[t][0], strict=False):
            yield Measurement("rate", step, abs(own - wanted), FP64_TOLERANCE * wanted)


def _nan_as_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def count_used_batches(ranks: list[RankBatches]) -> Counter[str]:
    """How often each microbatch that counts was used; one of weight 0 may be any."""
    marks: Counter[str] = Counter()
    for rank in ranks:
        marks.update(mark for mark, weight in rank.weighted_fingerprints if mark and weight != 0.0)
    return marks


def _count_wrong_batches(mine: list[RankBatches], wanted: list[RankBatches]) -> int:
    """Microbatches too many or too few."""
    one, other = count_used_batches(mine), count_used_batches(wanted)
    return sum(((one - other) + (other - one)).values())


def differing_tensors(run: RunRecord, allowance: Tolerance, step: int) -> tuple[StateKey, ...]:
    """Tensors of the state that are off after a step, by their sketches."""
    keys = [k for k in allowance.base.states[step] if k[0] not in allowance.noise]
    gone: list[StateKey] = []
    for key in keys:
        off, allowed = _measure_sketch(run, allowance, key, step)
        if not off <= SKETCH_FACTOR * allowed:
            gone.append(key)
    return tuple(gone)


def _measure_sketch(run: RunRecord, allowance: Tolerance, key: StateKey, step: int) -> tuple[float, float]:
    mine: SketchVector | None = run.states[step].get(key)
    if mine is None:
        return math.nan, 0.0
    apart: SketchVector = mine - allowance.base.states[step][key]
    return float((apart**2).sum() ** 0.5), allowance.sketches[step].get(key, 0.0)


def _measure_final_state(run: RunRecord, allowance: Tolerance) -> Iterator[Measurement]:
    base, last = allowance.base, run.steps
    for key, tensor in base.state.items():
        name, kind = key
        if key not in run.state:
            yield Measurement(kind, last, math.nan, 0.0, name)
        elif name not in allowance.noise:
            yield Measurement(kind, last, tensor_distance(run.state[key], tensor), allowance.state[key], name)
        elif kind == "exp_avg_sq":
            yield Measurement("gradient", last, gradient_share(run, name), NOISE_GRADIENT_SHARE, name)
