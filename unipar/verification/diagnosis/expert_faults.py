"""Kinds of faults of layers of experts: tokens lost on the way, auxiliary losses, experts without tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import Any, Final

import numpy as np
from torch import Tensor

from unipar.engines.router_choices import RouterChoice, moved_tokens
from unipar.utils.text import count_of, first_few
from unipar.verification.diagnosis.case import Fault, FaultCase, is_right, unit_gradients, whole_gradient
from unipar.verification.judgement.record import SketchVector

NEAR_TIE: Final = "a near-tie of a router"
"""Kind of a difference that is no fault of the strategy."""

_SHORT = 1e-6
"""Length of a gradient, relative to the longest of an expert's, that counts as zero."""

_ROW_NEAR = 1e-3
"""Distance of rows, relative to the mean length of a row, that counts as rounding in fp32."""


# Tokens


def classify_forward(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of outputs that differ first, if it is one of the way of tokens, or of an auxiliary loss."""
    return _classify_ties(case, step) or _classify_rows(case, step) or _classify_auxiliary(case, step, "forward")


def _classify_ties(case: FaultCase, step: int) -> Fault | None:
    """Return the near-ties of a router, if they are all that differs where outputs differ first."""
    place = case.module_differences["forward"]
    near = _ROW_NEAR * case.near / 0.005
    tied, total, widest = 0, 0, 0.0
    for mine, right in _calls(case, "rows", place.module):
        moved = moved_tokens(_choice(right), _choice(mine))
        tokens = {token.token for token in moved}
        widest = max([widest, *(token.gap for token in moved)])
        others = (mine["sketch"] - right["sketch"]).norm(dim=1)
        others[list(tokens)] = 0.0
        if widest > near or float(others.max()) > near * float(right["sketch"].norm(dim=1).mean()):
            return None
        tied, total = tied + len(tokens), total + len(others)
    if not tied:
        return None
    return Fault(
        NEAR_TIE,
        f"in step {step} {tied} of {count_of(total, 'token')} go to another expert of {place.module}, whose weight is "
        f"that of the expert in one process up to {widest:.1e}: rounding decides between them, and no fault of the "
        "strategy is known; fp64 (train.precision), or another seed, has fewer such ties",
    )


def _choice(row: Mapping[str, Any]) -> RouterChoice:
    return RouterChoice(row["experts"], row["weights"])


def _classify_rows(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a layer of experts that loses or confuses its tokens' outputs."""
    place = case.module_differences["forward"]
    wrong, dropped, total = 0, 0, 0
    moved = True
    near = _ROW_NEAR * case.near / 0.005
    for mine, right in _calls(case, "rows", place.module):
        parts: Tensor = right["parts"]
        wanted, off = right["sketch"], (mine["sketch"] - right["sketch"]).norm(dim=1)
        size = float(wanted.norm(dim=1).mean())
        rows = [int(row) for row in (off > near * size).nonzero()]
        total, wrong = total + len(wanted), wrong + len(rows)
        if float((parts.sum(1) - wanted).norm(dim=1).max()) > near * size:
            return None  # what experts return is not weighted by what they are called with
        dropped += sum(_lacks_parts(mine["sketch"][row], parts[row], near * size) for row in rows)
        sums = float((mine["sketch"].sum(0) - wanted.sum(0)).norm())
        moved = moved and sums <= near * size * len(wanted) ** 0.5
    if not wrong:
        return None
    measured = f"in step {step} {place.module} returns other rows for {wrong} of {count_of(total, 'token')}"
    if moved:
        return Fault(
            "tokens returned to the wrong place",
            f"{measured}, and the sums over all rows are right: what experts made of a token is given to another one",
        )
    if dropped == wrong:
        return Fault(
            "tokens dropped",
            f"{measured}, and what the rows lack is what some of the experts that were chosen made of these tokens: "
            "they were not sent to these experts, or did not come back",
        )
    return None


def _lacks_parts(row: Tensor, parts: Tensor, near: float) -> bool:
    """Return whether a row is the sum of some of its experts' parts, and not of all."""
    slots = range(len(parts))
    return any(
        float((row - parts[list(some)].sum(0)).norm()) <= near
        for count in range(len(parts))
        for some in combinations(slots, count)
    )


def _calls(case: FaultCase, way: str, module: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the rows of a module's trace in the run and in one process, for each microbatch."""
    wanted = {(row["at"], row["number"]): row for row in case.own.traced[0] if row["way"] == way}
    for seat, rows in zip(case.run.seats, case.run.traced, strict=True):
        for row in rows:
            right = wanted.get((row["at"], row["number"]))
            ours = row["way"] == way and row["module"] == module and row["number"] % case.shares == seat.share
            if ours and right is not None and row["shape"] == right["shape"]:
                yield row, right


# Auxiliary losses


def classify_backward(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of an auxiliary loss whose gradient alone is several times the right one."""
    return _classify_auxiliary(case, step, "backward") if "backward" in case.module_differences else None


def _classify_auxiliary(case: FaultCase, step: int, way: str) -> Fault | None:
    """Return the fault of a number, not the loss itself, that is the same multiple of the right one in each call."""
    module = case.module_differences[way].module
    factors: dict[str, list[float]] = {}
    for mine, right in _calls(case, way, module):
        if right["shape"] in ((), (1,)) and float(right["sketch"].norm()) > 0:
            key = right["at"].rpartition(".")[2]
            factors.setdefault(key, []).append(float(mine["sketch"].sum() / right["sketch"].sum()))
    for values in factors.values():
        times = round(values[0])
        if times > 1 and all(case.is_near(value, float(times)) for value in values):
            what = "a number" if way == "forward" else "the gradient of a number"
            return Fault(
                "an auxiliary loss counted several times",
                f"in step {step} {what} that {module} returns is {times} times that of one process in each microbatch: "
                "a loss of its own, as one that balances experts, is added up where its mean was to be taken",
            )
    return None


# Experts as units: a slice of a stacked parameter, or a parameter


def classify_idle(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of experts that no token chose, and that have the gradient of the step before."""
    if step < 2:
        return None
    gradients, right, before = unit_gradients(case, step), whole_gradient(case, step), whole_gradient(case, step - 1)
    units = [unit for unit in gradients if unit in right]
    least = _SHORT * max((float(np.linalg.norm(right[unit])) for unit in units), default=0.0)
    stale: list[str] = []
    for unit in units:
        mine, wanted, was = gradients[unit], right[unit], before[unit]
        if float(np.linalg.norm(wanted)) > least:
            factor, left = _fit(mine, wanted)
            if not is_right(case, factor, left):
                return None
        elif float(np.linalg.norm(mine)) > 10 * least:
            if not is_right(case, *_fit(mine, was)):
                return None
            stale.append(unit)
    if not stale:
        return None
    names = first_few([_shown(unit, units) for unit in stale])
    return Fault(
        "an old gradient of experts without tokens",
        f"in step {step} {names} have the gradient of step {step - 1}, and in one process none: no token chose these "
        "experts, and nothing set their gradients to zero",
    )


def _shown(unit: str, units: Collection[str]) -> str:
    """Return the name of a unit: that of its parameter, if this is not stacked."""
    name = unit.rpartition("[")[0]
    return unit if f"{name}[1]" in units else name


def _fit(mine: SketchVector, wanted: SketchVector) -> tuple[float, float]:
    size = max(float(np.dot(wanted, wanted)), 1e-300)
    factor = float(np.dot(mine, wanted)) / size
    return factor, float(np.linalg.norm(mine - factor * wanted)) / size**0.5


def find_swapped(case: FaultCase, names: list[str], allowed: float) -> dict[str, str]:
    """Return the units of these parameters that begin with each other's weights; none if others differ too."""
    mine, right = _first_units(case.run.states[0], names), _first_units(case.own.states[0], names)
    wrong = [unit for unit in right if unit not in mine or not _equal(mine[unit], right[unit], allowed)]
    sources = {
        unit: next((other for other in wrong if unit in mine and _equal(mine[unit], right[other], allowed)), "")
        for unit in wrong
    }
    if not all(sources.values()) or len({*sources.values()}) < len(sources):
        return {}
    return {_shown(unit, right): _shown(other, right) for unit, other in sources.items()}


def _first_units(state: Mapping[tuple[str, str], SketchVector], wanted: Collection[str]) -> dict[str, SketchVector]:
    weights = {name: sketch for (name, kind), sketch in state.items() if kind == "weight" and name.endswith("]")}
    return {unit: sketch for unit, sketch in weights.items() if unit.rpartition("[")[0] in wanted}


def _equal(one: SketchVector, other: SketchVector, allowed: float) -> bool:
    return float(np.linalg.norm(one - other)) <= 10 * allowed * float(np.linalg.norm(other))
