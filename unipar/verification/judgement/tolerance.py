"""How near is near enough: measured on one-process runs that differ only in how they add things up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from unipar.config import Precision
from unipar.verification.judgement.record import RunRecord, SketchVector, StateKey, tensor_distance

SPREAD_FACTOR = 4.0
"""How many times the spread of one process's own runs a cell may be off."""

NOISE_GRADIENT_SHARE = 1e-5
"""A parameter whose gradient is below this share of the model's is moved by rounding alone."""

ROUNDING_UNITS: dict[Precision, float] = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "bf16-mixed": 2.0**-23,  # its parameters, gradients and losses are fp32
    "bf16-master": 2.0**-8,
    "fp16": 2.0**-11,
}
"""The last place of the numbers that are compared; no spread is taken to be less than that."""


@dataclass(frozen=True)
class Tolerance:
    """By step for the loss and the norm, by name for the state at its end; and by both for sketches on the way."""

    base: RunRecord
    """The one process that all are held to."""

    losses: list[float]
    norms: list[float]
    state: dict[StateKey, float]
    sketches: list[dict[StateKey, float]]
    noise: frozenset[str]
    """Parameters that are judged by gradient."""


def measure_tolerance(
    base: RunRecord, others: Sequence[RunRecord], exact: RunRecord, precision: Precision
) -> Tolerance:
    """`others` and `base` did the same in one process, with other sums; `exact` is the fp64 run."""
    runs = [base, *others]
    last = ROUNDING_UNITS[precision]
    losses = [_at_least(_spread([r.losses[t] for r in runs]), last * abs(base.losses[t])) for t in range(base.steps)]
    norms = [_at_least(_spread([r.norms[t][0] for r in runs]), last * abs(base.norms[t][0])) for t in range(base.steps)]
    noise = _find_noise_parameters(exact)
    return Tolerance(
        base,
        [SPREAD_FACTOR * x for x in _running_maxima(losses)],
        [SPREAD_FACTOR * x for x in _running_maxima(norms)],
        _state_tolerance(runs, last),
        [{} if t == 0 else _sketch_tolerance([r.states[t] for r in runs], last) for t in range(base.steps + 1)],
        noise,
    )


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _at_least(spread: float, least: float) -> float:
    return max(spread, least)


def _running_maxima(values: Sequence[float]) -> Iterator[float]:
    """Differences add up from step to step: what was there once is there later."""
    highest = 0.0
    for value in values:
        highest = max(highest, value)
        yield highest


def _state_tolerance(runs: Sequence[RunRecord], last: float) -> dict[StateKey, float]:
    """The largest distance between any two; a tensor that was lucky is given what is usual for its kind."""
    base = runs[0].state
    apart = {
        k: max((tensor_distance(a.state[k], b.state[k]) for a, b in combinations(runs, 2)), default=0.0) for k in base
    }
    sizes = {k: float(t.double().norm()) for k, t in base.items()}
    return {k: SPREAD_FACTOR * x for k, x in _raise_to_median(apart, sizes, last).items()}


def _sketch_tolerance(states: Sequence[dict[StateKey, SketchVector]], last: float) -> dict[StateKey, float]:
    base = states[0]
    apart = {k: max((_length(a[k] - b[k]) for a, b in combinations(states, 2)), default=0.0) for k in base}
    sizes = {k: _length(v) for k, v in base.items()}
    return {k: SPREAD_FACTOR * x for k, x in _raise_to_median(apart, sizes, last).items()}


def _raise_to_median(apart: dict[StateKey, float], sizes: dict[StateKey, float], last: float) -> dict[StateKey, float]:
    usual: dict[str, float] = {}
    for kind in {kind for _, kind in apart}:
        shares = [apart[k] / sizes[k] for k in apart if k[1] == kind and sizes[k] > 0]
        usual[kind] = float(np.median(shares)) if shares else 0.0
    return {k: max(x, max(usual[k[1]], last) * sizes[k]) for k, x in apart.items()}


def _length(vector: SketchVector) -> float:
    return float(np.linalg.norm(vector))


def _find_noise_parameters(exact: RunRecord) -> frozenset[str]:
    """By the second moment in fp64: what is left of it there is the true gradient's."""
    second = {name: t.double() for (name, kind), t in exact.state.items() if kind == "exp_avg_sq"}
    if not second:
        return frozenset()
    whole = sum(float(t.sum()) for t in second.values()) / sum(t.numel() for t in second.values())
    return frozenset(n for n, t in second.items() if float(t.mean()) ** 0.5 < NOISE_GRADIENT_SHARE * whole**0.5)


def gradient_share(record: RunRecord, name: str) -> float:
    """The size of a parameter's gradient in proportion to the model's, by the second moment."""
    second = {n: t.double() for (n, kind), t in record.state.items() if kind == "exp_avg_sq"}
    whole = sum(float(t.sum()) for t in second.values()) / sum(t.numel() for t in second.values())
    return (float(second[name].mean()) / whole) ** 0.5
