"""`FaultCase`: a run that disagrees, with everything that its classification needs; and `Fault`, the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unipar.config import Config, Precision
from unipar.config.settled import SettledConfig
from unipar.verification.diagnosis.modules import LossDifference, ModuleDifference
from unipar.verification.diagnosis.sketched_gradients import GradientSketches, StateRule, gradients_from_state
from unipar.verification.judgement.judge import Judgement
from unipar.verification.judgement.record import RunRecord, SketchVector

FACTOR_TOLERANCE: dict[Precision, float] = {"fp64": 0.005, "fp32": 0.005}
"""Relative tolerance between a measured factor and a known one, by precision."""

COARSE_FACTOR_TOLERANCE = 0.03
"""Relative tolerance of factors in all coarser precisions."""

_SHORT = 1e-5
"""Share of the whole gradient's length below which that of one parameter is taken for rounding."""


@dataclass(frozen=True)
class Fault:
    """Kind of fault, and a sentence with the figures that indicate it."""

    name: str
    says: str
    candidates: tuple[str, ...] = ()
    """Kinds that fit equally well, if there are several; `name` lists them all."""

    measured: str = ""
    """Part of `says` that is true for every candidate."""

    parameters: tuple[str, ...] = ()
    """Parameters whose gradients are wrong, if those of all others are right."""


@dataclass(frozen=True)
class FaultCase:
    """Run that disagrees, with everything that its classification needs."""

    run: RunRecord
    base: RunRecord
    own: RunRecord
    """Replay in the run's own precision, up to the step that differs first."""

    replay: RunRecord
    """Replay in fp64 that keeps each microbatch's gradient apart."""

    judgement: Judgement
    settled: SettledConfig
    """Config of the strategy: a batch's shares, the microbatches of each, and which ranks work on one."""

    limit: float
    """Largest relative difference between the ranks' norms that counts as rounding."""

    module_differences: Mapping[str, ModuleDifference]
    """First module that differs, by direction."""

    loss_differences: Sequence[LossDifference]
    """Microbatches of the step whose losses differ from those of one process."""

    optimizer_uses_whole_tensors: bool | None
    """Whether the task's own optimizer uses whole tensors; None if the task has no optimizer of its own."""

    @property
    def config(self) -> Config:
        """Config of the strategy."""
        return self.settled.config

    @property
    def shares(self) -> int:
        """Number of shares of a batch: ranks, unless some of them work on the same samples."""
        return self.settled.sizes.ranks

    @property
    def accumulate(self) -> int:
        """Number of microbatches of each share, in the step that differs first if it depends on the samples."""
        if self.settled.sizes.tokens is not None:
            return len(self.replay.shares[-1]["parts"]) // self.shares
        return self.settled.sizes.accumulate

    def groups(self, step: int) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer that takes this step."""
        return [g for g in self.replay.groups if g["prefix"] == self.run.prefixes[step - 1]]

    @property
    def near(self) -> float:
        """Relative tolerance of factors in the run's precision."""
        return FACTOR_TOLERANCE.get(self.config.train.precision, COARSE_FACTOR_TOLERANCE)

    def is_near(self, value: float, wanted: float) -> bool:
        """Return whether a factor is the wanted one, up to rounding in the run's precision."""
        return abs(value - wanted) <= self.near * abs(wanted)


def share_gradients(case: FaultCase, step: int) -> dict[tuple[int, int], GradientSketches]:
    """Return the gradient of each microbatch and share of a step in one process."""
    shares: dict[tuple[int, int], GradientSketches] = {}
    for text, grads in case.replay.shares[step - 1]["parts"].items():
        micro, share = map(int, text.split("."))
        shares[micro, share] = {name: sketch.numpy() for name, sketch in grads.items()}
    return shares


def run_gradient(case: FaultCase, step: int) -> dict[str, SketchVector]:
    """Return the gradient of a step of the run, computed from its state."""
    config = case.config.of_part(case.run.prefixes[step - 1].removesuffix("."))
    return gradients_from_state(case.run, StateRule.of(config, case.groups(step)), step, _rate_by_parameter(case, step))


def unit_gradients(case: FaultCase, step: int) -> dict[str, SketchVector]:
    """Return the gradient of each unit of a parameter (`sketch_units`) in a step of the run."""
    config = case.config.of_part(case.run.prefixes[step - 1].removesuffix("."))
    rule, rates = StateRule.of(config, case.groups(step)), _rate_by_parameter(case, step)
    names = {unit: unit.rpartition("[")[0] for unit, _ in case.run.states[step] if unit.endswith("]")}
    decay = {unit: rule.decay[name] for unit, name in names.items() if name in rule.decay}
    by_unit = {unit: rates[name] for unit, name in names.items() if name in rates}
    return gradients_from_state(case.run, replace(rule, decay=decay), step, by_unit)


def norm_factor(case: FaultCase, step: int) -> float:
    """Return the factor between the norm of a step's gradient, before it is clipped, and that of one process."""
    norm, right = case.run.norms[step - 1][0], case.base.norms[step - 1][0]
    return norm / right if right > 0 else math.nan


def whole_gradient(case: FaultCase, step: int) -> GradientSketches:
    """Return the gradient of a step in one process."""
    total: dict[str, Any] = {}
    for grads in share_gradients(case, step).values():
        for name, sketch in grads.items():
            total[name] = total[name] + sketch if name in total else sketch
    return total


def gradient_factors(case: FaultCase, step: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield for each parameter the factor between its gradient and that of one process, and what is left then."""
    gradient, expected = run_gradient(case, step), whole_gradient(case, step)
    lengths = case.replay.shares[step - 1]["lengths"]
    total = math.hypot(*lengths.values())
    for name, right in expected.items():
        size = float(np.dot(right, right))
        if name in gradient and lengths[name] > _SHORT * total and size > 0:  # equal elements may cancel in a sketch
            factor = float(np.dot(gradient[name], right)) / size
            yield name, (factor, float(np.linalg.norm(gradient[name] - factor * right)) / size**0.5)


def is_right(case: FaultCase, factor: float, left: float) -> bool:
    """Return whether a gradient with this factor, and what is left then, is that of one process."""
    return case.is_near(factor, 1.0) and left <= 10 * case.near


def _rate_by_parameter(case: FaultCase, step: int) -> dict[str, float]:
    rates = case.run.rates[step - 1][0]
    return {n: rate for g, rate in zip(case.groups(step), rates, strict=False) for n in g["names"]}
