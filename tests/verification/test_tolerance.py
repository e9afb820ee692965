"""Tolerances where the optimizer's states have few bits, and single elements become neighbours of what they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unipar.optimizers.adamw_bf16 import AdamWBf16
from unipar.verification.judgement import tolerance
from unipar.verification.judgement.judge import judge
from unipar.verification.judgement.record import RunRecord
from unipar.verification.judgement.tolerance import measure_tolerance

STEPS, RATE = 10, 1e-3


def _run(noise: int, *, decay: float = 0.1, narrow: bool = True, frozen: bool = False) -> RunRecord:
    """Return the record of a run on gradients that differ in their last places.

    `frozen`: they come through frozen weights of few bits, so that one of ten thousand has the other sign.
    """
    generator = torch.Generator().manual_seed(5)
    sizes = {"large": 20_000, **{f"small {i}": 100 for i in range(20)}}
    params = {name: nn.Parameter(torch.randn(n, generator=generator)) for name, n in sizes.items()}
    kind: Any = AdamWBf16 if narrow else torch.optim.AdamW
    optimizer = kind(params.values(), lr=RATE, weight_decay=decay)
    rounding = torch.Generator().manual_seed(noise)
    for _ in range(STEPS):
        for p in params.values():
            off = 1 + 1e-6 * torch.randn(p.shape, generator=rounding)
            if frozen:
                off = torch.where(torch.rand(p.shape, generator=rounding) < 1e-4, -off, off)
            p.grad = torch.randn(p.shape, generator=generator) * off
        optimizer.step()
    state: dict[tuple[str, str], Tensor] = {}
    for name, p in params.items():
        state[name, "weight"] = p.detach()
        state |= {(name, key): optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}
    empty: Any = [[] for _ in range(STEPS)]
    return RunRecord(
        losses=[1.0] * STEPS,
        norms=[[1.0]] * STEPS,
        rates=[[[RATE]]] * STEPS,
        batches=empty,
        strays=empty,
        prefixes=[""] * STEPS,
        states=[{} for _ in range(STEPS + 1)],
        state=state,
        traced=[],
        seats=[],
        copies=[],
        held=[],
        masks=[],
        buffers={},
        first_buffers={},
        narrow=frozen,
    )


@pytest.fixture(scope="module")
def runs() -> list[RunRecord]:
    return [_run(noise) for noise in range(3)]


def _none(runs: list[RunRecord]) -> dict[Any, float]:
    return {}


def _worst(run: RunRecord, runs: list[RunRecord]) -> dict[str, float]:
    """Return the largest share of the tolerance by kind of state."""
    shares = judge(run, measure_tolerance(runs[0], runs[1:], runs[0], "fp32"), runs[0]).shares
    return {kind: shares[kind] for kind in ("weight", "exp_avg", "exp_avg_sq")}


def test_elements_that_became_neighbours_are_allowed(runs: list[RunRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of twenty small tensors have any in a few runs; by the spread of these, those of another would be faults."""
    others = [_run(noise) for noise in range(3, 9)]
    allowed = [max(_worst(run, runs).values()) for run in others]
    monkeypatch.setattr(tolerance, "_tolerance_of_single_elements", _none)
    by_spread = [max(_worst(run, runs).values()) for run in others]
    assert max(allowed) < 1.0
    assert max(by_spread) > 10
    assert min(by_spread) < 1.0


def test_another_rule_is_found(runs: list[RunRecord]) -> None:
    """A decay of 0.101 for 0.1 moves each weight by less than a neighbour does, and moves all; so do other moments."""
    assert _worst(_run(3, decay=0.101), runs)["weight"] > 1.0
    plain = _worst(_run(3, narrow=False), runs)
    assert plain["exp_avg"] > 2
    assert plain["weight"] > 2


def test_signs_over_frozen_weights_of_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full moments, but gradients of another sign: seldom in a small tensor, and all of a larger decay are found."""
    runs = [_run(noise, narrow=False, frozen=True) for noise in range(3)]
    others = [_run(noise, narrow=False, frozen=True) for noise in range(3, 9)]
    assert max(max(_worst(run, runs).values()) for run in others) < 1.0
    assert _worst(_run(3, narrow=False, frozen=True, decay=0.2), runs)["weight"] > 1.0
    monkeypatch.setattr(tolerance, "_tolerance_of_single_elements", _none)
    assert max(max(_worst(run, runs).values()) for run in others) > 10


def test_states_of_full_precision_have_no_neighbours() -> None:
    """A few roundings are allowed then."""
    runs = [_run(noise, narrow=False) for noise in range(3)]
    allowed = measure_tolerance(runs[0], runs[1:], runs[0], "fp32").state
    assert allowed["small 0", "exp_avg"] < 1e-5 * float(runs[0].state["small 0", "exp_avg"].norm())


def _with_noise(share: float) -> RunRecord:
    """Return the record of a run in which one parameter's gradient is this share of the model's."""
    run = _run(0, narrow=False)
    squares = float(torch.cat([t for (_, kind), t in run.state.items() if kind == "exp_avg_sq"]).double().mean())
    return replace(run, state=run.state | {("small 0", "exp_avg_sq"): torch.full((100,), share**2 * squares)})


def test_a_gradient_that_rounding_makes_of_none() -> None:
    """In fp64 it is none; how large it may be is measured in the precision of the run, or else 1e-5 of the model's."""
    exact = _with_noise(1e-12)
    small, large = ([_with_noise(share), _with_noise(0.9 * share)] for share in (1e-9, 9e-6))
    assert measure_tolerance(small[0], small[1:], exact, "fp32").noise == {"small 0": 1e-5}
    measured = measure_tolerance(large[0], large[1:], exact, "fp32")
    assert measured.noise == {"small 0": pytest.approx(3.6e-5, rel=0.02)}
    assert judge(_with_noise(3e-5), measured, large[0]).shares["gradient"] == pytest.approx(0.83, rel=0.02)
    assert judge(_with_noise(5e-5), measured, large[0]).shares["gradient"] > 1.3
