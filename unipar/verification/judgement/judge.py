"""Judgement on a strategy: each measured difference from one process, compared with its tolerance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unipar.utils.text import count_of
from unipar.verification.judgement.record import RankBatches, RunRecord, SketchVector, StateKey, tensor_distance
from unipar.verification.judgement.tolerance import SQUARED_GRADIENTS, Tolerance, gradient_shares

SKETCH_FACTOR = 4.0
"""Factor on a sketch's tolerance: a sketch gives lengths to a factor of two, so it locates a difference only."""

FP64_TOLERANCE = 1e-9
"""Tolerance of rates and sample weights, which are computed on the CPU in fp64."""


@dataclass(frozen=True)
class Measurement:
    """Measured difference of one quantity, in one step or at the end."""

    what: str
    """Quantity: samples, ranks' samples, sample weight, loss, norm, ranks' norms, rate, ranks' copies, ranks' weights,
    buffer, or a kind of state."""

    step: int
    off: float
    allowed: float
    name: str = ""
    """Name of the parameter; "" for a quantity of the whole model."""

    @property
    def share(self) -> float:
        """Difference as a share of the tolerance; infinite if missing, or if nothing is allowed."""
        if self.off == 0:
            return 0.0
        return math.inf if math.isnan(self.off) or self.allowed == 0 else self.off / self.allowed

    @property
    def says(self) -> str:
        """Sentence with quantity, step, difference and tolerance."""
        where = f" of {self.name}" if self.name else ""
        place = f"{self.what}{where} at step {self.step}"
        if self.what == "samples":
            return f"{place}: {self.off:.0f} microbatches too many or too few" if self.off else f"{place} are the same"
        if self.what == "ranks' samples":
            return f"{place}: {count_of(round(self.off), 'rank')} with other samples than those that share the work"
        if math.isnan(self.off):
            return f"{place} is missing or not a number"
        allowed = f"{self.allowed:.1e}" if self.allowed else "nothing"
        return f"{place} is off by {self.off:.1e}, {allowed} is allowed"


@dataclass(frozen=True)
class Judgement:
    """Result of comparing one run with its references."""

    worst: Measurement
    first: Measurement | None
    """First measurement beyond its tolerance, in the order of events in a step; None if the run agrees."""

    differing: tuple[StateKey, ...] = ()
    """Tensors that differ after the step of `first`, in the model's order."""

    shares: dict[str, float] = field(default_factory=dict[str, float])
    """Largest share of each quantity."""

    @property
    def agrees(self) -> bool:
        """Whether nothing is beyond its tolerance."""
        return self.first is None


def judge(run: RunRecord, tolerance: Tolerance, replay: RunRecord) -> Judgement:
    """Judge a run by its series and its final state; sketches only locate the first difference."""
    series = [m for t in range(run.steps) for m in _measure_step(run, tolerance, replay, t)]
    end = list(_measure_final_state(run, tolerance))
    shares: dict[str, float] = {}
    for measure in (*series, *end):
        shares[measure.what] = max(shares.get(measure.what, 0.0), measure.share)
    return replace(_locate(run, tolerance, series, end), shares=shares)


def _locate(
    run: RunRecord, tolerance: Tolerance, series: Sequence[Measurement], end: Sequence[Measurement]
) -> Judgement:
    """Return the largest difference, and the first one beyond its tolerance."""
    worst = max([*series, *end], key=lambda m: m.share)
    if worst.share <= 1.0:
        return Judgement(worst, None)
    for t in range(run.steps):
        for measure in series:
            if measure.step == t + 1 and measure.share > 1.0:
                return Judgement(worst, measure, differing_tensors(run, tolerance, t + 1))
        if keys := differing_tensors(run, tolerance, t + 1):
            off, allowed = _measure_sketch(run, tolerance, keys[0], t + 1)
            return Judgement(worst, Measurement(keys[0][1], t + 1, off, allowed, keys[0][0]), keys)
    return Judgement(worst, worst, tuple((m.name, m.what) for m in end if m.share > 1.0))


def _measure_step(run: RunRecord, tolerance: Tolerance, replay: RunRecord, t: int) -> Iterator[Measurement]:
    base, step = tolerance.base, t + 1
    yield Measurement("samples", step, float(_count_wrong_batches(run.batches[t], replay.batches[t])), 0.0)
    yield Measurement("ranks' samples", step, float(len(run.strays[t])), 0.0)
    yield Measurement("sample weight", step, abs(sum(rank.weight for rank in run.batches[t]) - 1.0), FP64_TOLERANCE)
    yield Measurement("loss", step, abs(run.losses[t] - base.losses[t]), tolerance.losses[t])
    norm = base.norms[t][0]
    mine = run.norms[t]
    yield Measurement("ranks' norms", step, max(mine) - min(mine), tolerance.norms[t])
    yield Measurement("norm", step, max((abs(n - norm) for n in mine), key=_nan_as_infinity), tolerance.norms[t])
    for rank in run.rates[t]:
        for own, wanted in zip(rank, base.rates[t][0], strict=False):
            yield Measurement("rate", step, abs(own - wanted), FP64_TOLERANCE * wanted)
    if run.copies:
        yield from _measure_copies(run, tolerance, step)
    if run.held:
        yield from _measure_held_weights(run, tolerance, step)


def _measure_held_weights(run: RunRecord, tolerance: Tolerance, step: int) -> Iterator[Measurement]:
    """Yield the largest difference between weights that several ranks hold and train on samples of their own."""
    worst = Measurement("ranks' weights", step, 0.0, 0.0)
    for (name, _), copies in run.held[step].items():
        allowed = SKETCH_FACTOR * tolerance.sketches[step].get((name, "weight"), 0.0)
        measure = Measurement("ranks' weights", step, spread_of_copies(copies)[0], allowed, name)
        worst = max(worst, measure, key=lambda m: m.share)
    yield worst


def spread_of_copies(copies: Mapping[int, SketchVector]) -> tuple[float, int, int]:
    """Return the largest distance of a rank's copy from that of the first rank, and both ranks."""
    (first, one), *others = sorted(copies.items())
    return max((float(((mine - one) ** 2).sum() ** 0.5), first, rank) for rank, mine in others)


def _measure_copies(run: RunRecord, tolerance: Tolerance, step: int) -> Iterator[Measurement]:
    """Yield the largest difference between copies of a parameter on ranks that work on the same samples."""
    worst = Measurement("ranks' copies", step, 0.0, 0.0)
    for key, copies in run.copies[step - 1].items():
        allowed = SKETCH_FACTOR * tolerance.sketches[step].get(key, 0.0)
        for off in copy_distances(run, copies).values():
            measure = Measurement("ranks' copies", step, off, allowed, key[0])
            worst = max(worst, measure, key=lambda m: m.share)
    yield worst


def copy_distances(run: RunRecord, copies: Mapping[int, SketchVector]) -> dict[tuple[int, int], float]:
    """Return the distance of each rank's copy from that of the first rank with the same share, by both ranks."""
    distances: dict[tuple[int, int], float] = {}
    first: dict[int, int] = {}
    for rank, mine in sorted(copies.items()):
        one = first.setdefault(run.seats[rank].share, rank)
        if one != rank:
            distances[one, rank] = float(((mine - copies[one]) ** 2).sum() ** 0.5)
    return distances


def _nan_as_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def count_used_batches(ranks: list[RankBatches]) -> Counter[str]:
    """Return how often each microbatch was used, without those of weight 0, which may hold anything."""
    marks: Counter[str] = Counter()
    for rank in ranks:
        marks.update(mark for mark, weight in rank.weighted_fingerprints if mark and weight != 0.0)
    return marks


def _count_wrong_batches(mine: list[RankBatches], wanted: list[RankBatches]) -> int:
    """Return the number of microbatches that are missing or superfluous."""
    one, other = count_used_batches(mine), count_used_batches(wanted)
    return sum(((one - other) + (other - one)).values())


def differing_tensors(run: RunRecord, tolerance: Tolerance, step: int) -> tuple[StateKey, ...]:
    """Return the tensors whose sketches differ after a step by more than their tolerance."""
    keys = [k for k in tolerance.base.states[step] if k[0] not in tolerance.noise]
    differing: list[StateKey] = []
    for key in keys:
        off, allowed = _measure_sketch(run, tolerance, key, step)
        if not off <= SKETCH_FACTOR * allowed:
            differing.append(key)
    return tuple(differing)


def _measure_sketch(run: RunRecord, tolerance: Tolerance, key: StateKey, step: int) -> tuple[float, float]:
    mine: SketchVector | None = run.states[step].get(key)
    if mine is None:
        return math.nan, 0.0
    difference: SketchVector = mine - tolerance.base.states[step][key]
    return float((difference**2).sum() ** 0.5), tolerance.sketches[step].get(key, 0.0)


def _measure_final_state(run: RunRecord, tolerance: Tolerance) -> Iterator[Measurement]:
    base, last = tolerance.base, run.steps
    gradients = gradient_shares(run) if tolerance.noise else {}
    for key, tensor in base.state.items():
        name, kind = key
        if key not in run.state:
            yield Measurement(kind, last, math.nan, 0.0, name)
        elif name not in tolerance.noise:
            yield Measurement(kind, last, tensor_distance(run.state[key], tensor), tolerance.state[key], name)
        elif kind in SQUARED_GRADIENTS:
            yield Measurement("gradient", last, gradients.get(name, 0.0), tolerance.noise[name], name)
    if run.copies:
        for name, (buffer, allowed) in tolerance.buffers.items():
            off = tensor_distance(run.buffers[name], buffer) if name in run.buffers else math.nan
            yield Measurement("buffer", last, off, allowed, name)
