"""Tolerances of a model whose frozen weights are narrower than what is trained: a spread may be small by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unipar.verification.judgement.judge import judge
from unipar.verification.judgement.record import RankBatches, RunRecord
from unipar.verification.judgement.tolerance import measure_tolerance

ONE = [6.2455358, 6.2596011, 6.2436690, 6.2454133]
OTHERS = [
    [6.2455363, 6.2596054, 6.2436638, 6.2454342],
    [6.2455363, 6.2596016, 6.2436519, 6.2454109],
    [6.2455363, 6.2596079, 6.2436771, 6.2454490],
]
EXACT = [6.2455406, 6.2596083, 6.2436690, 6.2454352]
SPLIT = [6.2455139, 6.2596449, 6.2436304, 6.2454004]
"""Losses of a LoRA over a frozen base in bf16: one process, smaller microbatches and products in parts, fp64, and ranks
of tensor."""


def record(losses: list[float], *, narrow: bool) -> RunRecord:
    """Return the record of a run with these losses, and one weight."""
    steps = len(losses)
    lists: dict[str, Any] = {"prefixes": [""] * steps, "traced": [], "seats": [], "copies": [], "held": [], "masks": []}
    return RunRecord(
        losses=losses,
        norms=[[0.5]] * steps,
        rates=[[[0.1]]] * steps,
        batches=[[RankBatches(("a",), (1.0,), ("a",))]] * steps,
        strays=[[]] * steps,
        states=[{}] * (steps + 1),
        state={("w", "weight"): torch.ones(4)},
        buffers={},
        first_buffers={},
        narrow=narrow,
        **lists,
    )


@pytest.mark.parametrize(
    ("narrow", "allowed", "share"),
    [(True, [6.5e-5, 6.5e-5, 1.0e-4, 1.5e-4], 0.68), (False, [3.0e-6, 2.7e-5, 1.0e-4, 1.5e-4], 7.4)],
)
def test_a_spread_that_is_small_by_chance(*, narrow: bool, allowed: list[float], share: float) -> None:
    """If frozen weights have fewer digits than the loss, a step is allowed what is usual for one; fp64 counts."""
    one, exact, split, *others = (record(losses, narrow=narrow) for losses in (ONE, EXACT, SPLIT, *OTHERS))
    tolerance = measure_tolerance(one, [*others, exact] if narrow else others, exact, "fp32")
    assert tolerance.losses == pytest.approx(allowed, rel=0.05)
    assert judge(split, tolerance, one).shares["loss"] == pytest.approx(share, rel=0.05)
