"""Diagnosis of records with parameters that have no gradient, or of which a sketch shows none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from unipar.verification.diagnosis import case as case_module
from unipar.verification.diagnosis import faults
from unipar.verification.diagnosis.case import gradient_factors
from unipar.verification.diagnosis.sketched_gradients import find_unmoved_parameters
from unipar.verification.judgement.record import RunRecord
from unipar.verification.judgement.tolerance import gradient_shares


def _record(**fields: Any) -> RunRecord:
    """Return what is needed of a record."""
    return cast("RunRecord", SimpleNamespace(**fields))


def _case(*, norms: tuple[float, ...] = (), lengths: dict[str, float] | None = None, clip: float = 1.0) -> Any:
    """Return what is needed of a run that disagrees."""
    clipping = SimpleNamespace(max=clip)
    return SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(clipping=clipping)),
        replay=SimpleNamespace(shares=[{"norms": list(norms), "lengths": lengths}]),
        near=0.005,
    )


def test_a_run_without_any_gradient() -> None:
    """If all of a run's squared gradients are zero, no parameter has a share of them; empty ones never have."""
    weights = {("w", "weight"): torch.ones(3), ("empty", "exp_avg_sq"): torch.zeros(0)}
    assert gradient_shares(_record(state=weights | {("w", "exp_avg_sq"): torch.zeros(3)})) == {}
    assert gradient_shares(_record(state=weights | {("w", "exp_avg_sq"): torch.ones(3)})) == {"w": 1.0}


def test_a_name_that_one_process_does_not_have() -> None:
    """A tied weight that has become two in the run is passed over; one that does not move is found."""

    def weights(**values: float) -> dict[Any, Any]:
        return {(name, "weight"): np.array([value]) for name, value in values.items()}

    base = _record(states=[weights(token=1.0, bias=1.0), weights(token=2.0, bias=2.0)])
    run = _record(states=[weights(token=1.0, bias=1.0, head=1.0), weights(token=2.0, bias=1.0, head=1.0)])
    assert find_unmoved_parameters(run, base, 1) == ["bias"]


def test_equal_elements_that_cancel_in_a_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient whose sketch is zero gives no factor, and the others do."""
    sketches = {"norm.bias": np.zeros(8), "w": np.ones(8), "single": np.array([2.0, *[0.0] * 7])}

    def run_gradient(case: Any, step: int) -> dict[str, Any]:
        return {name: 2 * sketch for name, sketch in sketches.items()}

    def whole_gradient(case: Any, step: int) -> dict[str, Any]:
        return sketches

    monkeypatch.setattr(case_module, "run_gradient", run_gradient)
    monkeypatch.setattr(case_module, "whole_gradient", whole_gradient)
    case = _case(lengths={"norm.bias": 1.0, "w": 1.0, "single": 2.0})
    factors = dict(gradient_factors(case, 1))
    assert factors == {"w": (2.0, 0.0), "single": (2.0, 0.0)}


@pytest.mark.parametrize(("by_share", "clipped"), [((1.0, 0.25), True), ((1.0, 1.0), False)])
def test_a_share_without_a_gradient(by_share: tuple[float, float], clipped: bool) -> None:
    """A share of weight 0 has a norm of 0, and is not clipped; the other one is, by its own norm."""
    case = _case(norms=(0.0, 4.0))
    assert faults._is_clipped_per_rank(case, np.array(by_share), 1) is clipped  # pyright: ignore[reportPrivateUsage]
