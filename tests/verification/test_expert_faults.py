"""Faults of layers of experts, planted in a training over ranks of `expert`: `verify` finds each and names it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.forks import Forks
from tests.support.verifications import verified
from unipar.backend import Region
from unipar.engines.fingerprint import TensorSketcher, sketch_units
from unipar.verification.diagnosis.expert_faults import classify_forward

EXPERTS = (
    "4 parameters (model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj, "
    "model.layers.1.mlp.experts.gate_up_proj and 1 more)"
)

STACKED = {
    "experts-divided": (
        "divided by the size of expert",
        f"the gradient of {EXPERTS} is 0.5 times that of one process in step 1: it was divided by the 2 ranks of "
        "expert, whose tokens it contains already",
    ),
    "experts-doubled": (
        "a gradient multiplied in each microbatch, of some parameters",
        f"in {EXPERTS} and no other, the gradient of step 1 contains the microbatches, first to last, with the weights "
        "2.000, 1.000: what has been accumulated is added up over the ranks again in each further microbatch",
    ),
    "router-apart": (
        "not reduced, of some parameters",
        "in 2 parameters (model.layers.0.mlp.gate.weight, model.layers.1.mlp.gate.weight) and no other, the gradient "
        "of step 1 contains the ranks' shares with the weights 2.000, -0.000: each rank uses only its own samples",
    ),
    "auxiliary-loss-times": (
        "an auxiliary loss counted several times",
        "in step 1 a number that (the model) returns is 2 times that of one process in each microbatch: a loss of its "
        "own, as one that balances experts, is added up where its mean was to be taken",
    ),
    "tokens-dropped": (
        "tokens dropped",
        "in step 1 model.layers.0.mlp.experts returns other rows for 94 of 192 tokens, and what the rows lack is what "
        "some of the experts that were chosen made of these tokens: they were not sent to these experts, or did not "
        "come back",
    ),
    "tokens-misplaced": (
        "tokens returned to the wrong place",
        "in step 1 model.layers.0.mlp.experts returns other rows for 192 of 192 tokens, and the sums over all rows are "
        "right: what experts made of a token is given to another one",
    ),
    "experts-swapped": (
        "weights in each other's place",
        "before step 1, model.layers.0.mlp.experts.gate_up_proj[0] has the weights that "
        "model.layers.0.mlp.experts.gate_up_proj[1] has in one process, and of 8 such tensors each has those of "
        "another one: they were loaded, or sent to their ranks, in another order",
    ),
}
"""Kind of fault and sentence, by planted fault, in Mixtral."""

IDLE = {
    "list": (
        {"rare": -1.2},
        "in step 2 layers.0.mixture.experts.0.0.weight, layers.0.mixture.experts.0.0.bias, "
        "layers.0.mixture.experts.0.2.weight and 1 more have the gradient of step 1",
    ),
    "stacked": (
        {"rare": -1.35},
        "in step 5 layers.1.mixture.experts.up[0], layers.1.mixture.experts.down[0] have the gradient of step 4",
    ),
}
"""Arguments of a user's mixture, one expert of which few tokens choose, and the beginning of the sentence."""

AT_ONCE = ("tokens-dropped", "tokens-misplaced", "experts-swapped", "experts-doubled")
"""Faults that are planted whenever tests run; the others are in the sweeps."""


def planted(forks: Forks, folder: Path, task: str, faults: list[str], *, steps: int = 3, **args: Any) -> dict[str, Any]:
    """Verify a training over two ranks of experts without a fault, and with each of these; return the verdicts."""
    strategies = {f"faulty/nothing+{fault}+expert2": fault for fault in ("healthy-mesh", *faults)}
    _, said = verified(
        forks, folder, f"tests.support.expert_models:{task}", [*strategies], steps=steps, backend="faulty", **args
    )
    return {strategies[row["strategy"]]: row for row in said["strategies"]}


@pytest.fixture(scope="module")
def stacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """Verdicts on Mixtral, of the faults that the collected tests ask for."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    asked = [fault for fault in STACKED if any(call and call.params.get("stacked_fault") == fault for call in calls)]
    asked = asked or [*STACKED]
    return planted(forks, tmp_path_factory.mktemp("stacked"), "OfTransformers", asked)


@pytest.mark.parametrize(
    "stacked_fault", [pytest.param(f, marks=[] if f in AT_ONCE else [pytest.mark.sweep]) for f in STACKED]
)
def test_a_fault_of_stacked_experts(stacked: dict[str, Any], stacked_fault: str) -> None:
    """Each is found, with its kind and the figures that show it."""
    row = stacked[stacked_fault]
    assert row["outcome"] == "disagrees", row
    assert (row["finding"]["kind"], row["finding"]["says"]) == STACKED[stacked_fault]


def test_right_experts_agree(stacked: dict[str, Any]) -> None:
    """Nothing is named in a training over ranks of experts without a fault."""
    assert (stacked["healthy-mesh"]["outcome"], stacked["healthy-mesh"]["finding"]) == ("agrees", None)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", IDLE)
def test_an_old_gradient(tmp_path: Path, forks: Forks, kind: str) -> None:
    """An expert that no token chose in a step keeps its gradient of the step before; without that all agrees."""
    args, says = IDLE[kind]
    rows = planted(forks, tmp_path, "OfUser", ["stale-experts"], kind=kind, steps=5, **args)
    finding = rows["stale-experts"]["finding"]
    assert (finding["kind"], finding["says"]) == (
        "an old gradient of experts without tokens",
        f"{says}, and in one process none: no token chose these experts, and nothing set their gradients to zero",
    )
    assert (rows["healthy-mesh"]["outcome"], rows["healthy-mesh"]["finding"]) == ("agrees", None)


@pytest.mark.sweep
def test_ties_of_a_router_agree(tmp_path: Path, forks: Forks) -> None:
    """Scores that rounding alone orders move tokens in one process as well, so that the spread has them."""
    row = planted(forks, tmp_path, "Tied", [])["healthy-mesh"]
    assert (row["outcome"], row["finding"]) == ("agrees", None)


@pytest.mark.parametrize(("weight", "kind"), [(0.2500001, "a near-tie of a router"), (0.26, None)])
def test_a_near_tie(weight: float, kind: str | None) -> None:
    """Another expert of the same weight up to rounding is named as a near-tie, one of another weight is not."""

    def row(experts: list[int], last: float, out: float) -> dict[str, Any]:
        rows = {"sketch": torch.tensor([[1.0, 2.0], [out, 1.0]]), "parts": torch.ones(2, 2, 2)}
        choice = {"experts": torch.tensor([[0, 1], experts]), "weights": torch.tensor([[0.5, 0.5], [0.75, last]])}
        return {"way": "rows", "module": "experts", "at": "experts#1", "number": 0, "shape": (2, 2), **rows, **choice}

    run, own = row([2, 1], weight, 5.0), row([2, 0], 0.25, 3.0)
    case: Any = SimpleNamespace(
        run=SimpleNamespace(traced=[[run]], seats=[SimpleNamespace(share=0)]),
        own=SimpleNamespace(traced=[[own]]),
        module_differences={"forward": SimpleNamespace(module="experts")},
        shares=1,
        near=0.005,
    )
    fault = classify_forward(case, 1)
    assert (fault and fault.name) == kind
    if fault is not None:
        assert fault.says == (
            "in step 1 1 of 2 tokens go to another expert of experts, whose weight is that of the expert in one "
            "process up to 3.6e-07: rounding decides between them, and no fault of the strategy is known; fp64 "
            "(train.precision), or another seed, has fewer such ties"
        )


def test_units_of_a_stacked_parameter() -> None:
    """Each slice is a unit; equal ones have equal sketches, and those of parts that ranks hold add up to them."""
    stacked, sketches = torch.randn(3, 4, 5), TensorSketcher()
    stacked[2] = stacked[0]
    flat = stacked.flatten()

    def units(first: int, last: int) -> dict[str, torch.Tensor]:
        where = Region(first, last - first)
        return dict(sketch_units(sketches, "up", (3, 4, 5), where, flat[first:last]))

    whole, one, other = units(0, 60), units(0, 33), units(33, 60)
    assert list(whole) == ["up[0]", "up[1]", "up[2]"]
    assert torch.equal(whole["up[0]"], whole["up[2]"])
    assert not torch.equal(whole["up[0]"], whole["up[1]"])
    torch.testing.assert_close(one["up[1]"] + other["up[1]"], whole["up[1]"])
    assert list(dict(sketch_units(sketches, "head", (12, 5), Region(0, 60), flat))) == ["head[0]"]
