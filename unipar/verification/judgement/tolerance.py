"""Tolerances, measured on one-process runs that differ only in the order of their sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from unipar.config import Precision
from unipar.verification.judgement.record import RunRecord, SketchVector, StateKey, norm_of, tensor_distance

SPREAD_FACTOR = 4.0
"""Factor between the spread of the one-process runs and the tolerance of a strategy."""

NOISE_GRADIENT_SHARE = 1e-5
"""Share of the model's gradient below which a parameter's gradient is nothing but rounding noise."""

SQUARED_GRADIENTS = ("exp_avg_sq", "square_avg")
"""Means of squared gradients, as Adam and RMSprop call them in their states."""

ROUNDING_UNITS: dict[Precision, float] = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "bf16-mixed": 2.0**-23,  # its parameters, gradients and losses are fp32, as those of fp8
    "fp8": 2.0**-23,
    "fp8-rowwise": 2.0**-23,
    "bf16-master": 2.0**-8,
    "fp16": 2.0**-11,
}
"""Relative size of the last place of the compared numbers, by precision; the least spread that is assumed."""

_FEW_BITS: Mapping[torch.dtype, float] = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.uint8: 2.0**-8}
"""Distance from a number of a narrow state to the next one, as a share of the largest, by dtype."""

_RATE_OF_A_NEIGHBOUR = 1 / 16
"""Share of the rate by which a weight may be off, as its moment became the neighbour of what it is in another run."""

_FEWEST_NEIGHBOURS = 4
"""Elements of a tensor that may always be such."""

_FEW_RUNS_FACTOR = 16.0
"""Factor on a tolerance that was measured on few runs."""

_BUFFER_ROUNDING = 4.0
"""Units in the last place by which a buffer may always be off."""


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences: of loss and norm by step, of the final state by tensor, of sketches by both."""

    base: RunRecord
    """One-process run that all strategies are compared with."""

    losses: list[float]
    norms: list[float]
    state: dict[StateKey, float]
    sketches: list[dict[StateKey, float]]
    noise: Mapping[str, float]
    """Parameters whose gradient is rounding noise, each with the largest allowed share of its gradient in the model's,
    by which it is judged."""

    buffers: dict[str, tuple[Tensor, float]] = field(default_factory=dict[str, tuple[Tensor, float]])
    """Each buffer at the end, and its largest allowed difference, for strategies whose ranks share the work."""


def measure_tolerance(
    base: RunRecord,
    others: Sequence[RunRecord],
    exact: RunRecord,
    precision: Precision,
    replays: Sequence[RunRecord] = (),
) -> Tolerance:
    """Return the tolerances from one-process runs that add in other orders; `exact` is the fp64 run.

    `replays` are those runs that cut batches as the strategies do: running statistics depend on that.
    """
    runs = [base, *others]
    last = ROUNDING_UNITS[precision]
    losses = [_at_least(_spread([r.losses[t] for r in runs]), last * abs(base.losses[t])) for t in range(base.steps)]
    norms = [_at_least(_spread([r.norms[t][0] for r in runs]), last * abs(base.norms[t][0])) for t in range(base.steps)]
    if base.narrow:
        losses, norms = _raise_to_usual_step(losses), _raise_to_usual_step(norms)
    noise = _noise_tolerance(runs, exact)
    few_bits = _tolerance_of_single_elements(runs)
    sketches = [_sketch_tolerance([r.states[t] for r in runs], last) for t in range(1, base.steps + 1)]
    return Tolerance(
        base,
        [SPREAD_FACTOR * x for x in _running_maxima(losses)],
        [SPREAD_FACTOR * x for x in _running_maxima(norms)],
        _raised(_state_tolerance(runs, last), few_bits),
        [{}, *(_raised(each, few_bits) for each in sketches)],
        noise,
        _buffer_tolerance(replays, last),
    )


def widen(tolerance: Tolerance, other: Tolerance) -> Tolerance:
    """Return a tolerance around the same run that allows several times what both allow.

    It is for a run with dropout, with which few runs of one process can be compared: whether the masks are the same.
    Other masks are off by thousands of times more.
    """
    times = _FEW_RUNS_FACTOR

    def larger(one: dict[StateKey, float], two: dict[StateKey, float]) -> dict[StateKey, float]:
        return {key: times * max(value, two.get(key, 0.0)) for key, value in one.items()}

    return replace(
        tolerance,
        losses=[times * max(pair) for pair in zip(tolerance.losses, other.losses, strict=True)],
        norms=[times * max(pair) for pair in zip(tolerance.norms, other.norms, strict=True)],
        state=larger(tolerance.state, other.state),
        sketches=[larger(*pair) for pair in zip(tolerance.sketches, other.sketches, strict=True)],
        buffers={
            name: (buffer, times * max(off, other.buffers.get(name, (buffer, 0.0))[1]))
            for name, (buffer, off) in tolerance.buffers.items()
        },
    )


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _at_least(spread: float, least: float) -> float:
    return max(spread, least)


def _running_maxima(values: Sequence[float]) -> Iterator[float]:
    """Yield the largest value so far: differences accumulate, so a spread seen once is allowed in later steps."""
    highest = 0.0
    for value in values:
        highest = max(highest, value)
        yield highest


def _raise_to_usual_step(spreads: Sequence[float]) -> list[float]:
    """Return the spreads of steps, raised to their median.

    Where frozen weights have fewer digits than the numbers that are compared, a loss is off by many of its last places,
    and two runs may be near one another by chance: if all draw from one normal distribution, a third run is off by more
    than four times their difference in one step of seven.
    """
    usual = float(np.median(spreads)) if spreads else 0.0
    return [max(spread, usual) for spread in spreads]


def _state_tolerance(runs: Sequence[RunRecord], last: float) -> dict[StateKey, float]:
    """Return by tensor the largest distance between any two runs, but at least what is usual for its kind."""
    base = runs[0].state
    distances = {
        k: max((tensor_distance(a.state[k], b.state[k]) for a, b in combinations(runs, 2)), default=0.0) for k in base
    }
    sizes = {k: float(t.double().norm()) for k, t in base.items()}
    return {k: SPREAD_FACTOR * x for k, x in _raise_to_median(distances, sizes, last).items()}


def _tolerance_of_single_elements(runs: Sequence[RunRecord]) -> dict[StateKey, float]:
    """Return by tensor how far single elements may take it, where states or frozen weights have few bits; else {}.

    A sum that rounds otherwise makes a state of few bits the neighbour of what it is in another run, and gradients
    through frozen weights of few bits another sign where they are near zero: seldom, and then by a thousand times
    more. A small tensor has none in a few runs, and one in the next. So what is allowed is measured on all tensors of a
    kind together: how many elements are off, and how far the farthest is.
    """
    base = runs[0].state
    narrow = {kind: _FEW_BITS[t.dtype] for (_, kind), t in base.items() if kind != "weight" and t.dtype in _FEW_BITS}
    if not narrow and not runs[0].narrow:
        return {}
    least: dict[str, float] = {}
    fewest = SPREAD_FACTOR**2  # one element, as far off as four times the farthest
    if narrow:
        fewest = _FEWEST_NEIGHBOURS
        rate = max(rate for step in runs[0].rates for rank in step for rate in rank)
        least = {"weight": _RATE_OF_A_NEIGHBOUR * rate, "average": _RATE_OF_A_NEIGHBOUR * rate} | narrow
    allowed: dict[StateKey, float] = {}
    for kind in {kind for _, kind in base}:
        keys = [key for key in base if key[1] == kind and base[key].numel()]
        sizes = {k: 1.0 if kind in ("weight", "average") else float(base[k].double().abs().max()) for k in keys}
        distances = {k: _farthest([run.state[k] for run in runs]) / (sizes[k] or 1.0) for k in keys}
        worst = max([least.get(kind, 0.0), *(float(off.max()) for off in distances.values())])
        many = sum(int((off > worst / 16).sum()) for off in distances.values())
        share = many / max(1, sum(off.numel() for off in distances.values()))
        for k, off in distances.items():
            allowed[k] = (fewest + 2 * share * off.numel()) ** 0.5 * worst * sizes[k]
    return allowed


def _farthest(values: Sequence[Tensor]) -> Tensor:
    """Return how far each element is at most from itself in another run."""
    several = torch.stack([value.double() for value in values])
    return several.amax(0) - several.amin(0)


def _raised(allowed: dict[StateKey, float], least: Mapping[StateKey, float]) -> dict[StateKey, float]:
    return {key: max(value, least.get(key, 0.0)) for key, value in allowed.items()}


def _buffer_tolerance(replays: Sequence[RunRecord], last: float) -> dict[str, tuple[Tensor, float]]:
    """Return each buffer, and how far it may be off: its spread, or the rounding of the numbers that it averages."""
    tolerances: dict[str, tuple[Tensor, float]] = {}
    for name, buffer in (replays[0].buffers if replays else {}).items():
        distance = max(tensor_distance(buffer, other.buffers[name]) for other in replays)
        least = _BUFFER_ROUNDING * last * float(buffer.double().norm())
        tolerances[name] = buffer, SPREAD_FACTOR * max(distance, least)
    return tolerances


def _sketch_tolerance(states: Sequence[dict[StateKey, SketchVector]], last: float) -> dict[StateKey, float]:
    base = states[0]
    distances = {k: max((norm_of(a[k] - b[k]) for a, b in combinations(states, 2)), default=0.0) for k in base}
    sizes = {k: norm_of(v) for k, v in base.items()}
    return {k: SPREAD_FACTOR * x for k, x in _raise_to_median(distances, sizes, last).items()}


def _raise_to_median(
    differences: dict[StateKey, float], sizes: dict[StateKey, float], last: float
) -> dict[StateKey, float]:
    """Return the distances, raised to the median of their kind and to the last place, both relative to the size."""
    usual: dict[str, float] = {}
    for kind in {kind for _, kind in differences}:
        shares = [differences[k] / sizes[k] for k in differences if k[1] == kind and sizes[k] > 0]
        usual[kind] = float(np.median(shares)) if shares else 0.0
    return {k: max(x, max(usual[k[1]], last) * sizes[k]) for k, x in differences.items()}


def _noise_tolerance(runs: Sequence[RunRecord], exact: RunRecord) -> dict[str, float]:
    """Return the parameters without a true gradient, with the share of the model's gradient that theirs may be.

    A true gradient is seen in fp64, where rounding is negligible; what rounding makes of none, in the other runs.
    """
    noise = [name for name, share in gradient_shares(exact).items() if share < NOISE_GRADIENT_SHARE]
    shares = [gradient_shares(run) for run in runs]
    return {
        name: max(NOISE_GRADIENT_SHARE, SPREAD_FACTOR * max(share.get(name, 0.0) for share in shares)) for name in noise
    }


def gradient_shares(record: RunRecord) -> dict[str, float]:
    """Return the size of each parameter's gradient relative to the model's, by the mean of its squares.

    It is {} if the optimizer's state does not tell, or the model has no gradient at all.
    """
    squares = {n: t.double() for (n, kind), t in record.state.items() if kind in SQUARED_GRADIENTS}
    sums = {name: float(t.sum()) for name, t in squares.items()}
    mean = sum(sums.values()) / max(1, sum(t.numel() for t in squares.values()))
    return {name: (sums[name] / t.numel() / mean) ** 0.5 for name, t in squares.items() if t.numel()} if mean else {}
