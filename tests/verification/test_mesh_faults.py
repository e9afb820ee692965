"""Faults of ranks that share the work on the same samples: `verify` finds each and names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.verifications import verified

STAGES = {
    "tied-not-summed": (
        "a tied gradient not summed",
        "after step 1, token.weight differs between stage 0 and stage 1, which both use it: each stage updates it by "
        "its own part of the gradient, and the parts must be added up first",
    ),
    "same-masks": (
        "the same dropout masks on two stages",
        "in step 1, microbatch 1 of the batch, stage 1 draws the masks of the first stage again, from the first on: "
        "the state of the random generator must travel with the hidden states",
    ),
    "stale-statistics": (
        "a stage's stale running statistics",
        "after step 3, 4 buffers (blocks.2.statistics.running_mean, blocks.2.statistics.running_var, "
        "blocks.3.statistics.running_mean and 1 more) are still what they were before the first step: they come from a "
        "rank that does not run these modules, not from their own stage",
    ),
    "norm-counts-twice": (
        "a norm that counts copies twice",
        ", while all gradients are right: every copy of token.weight counts, on up to 2 ranks, and each parameter must "
        "count once",
    ),
    "world-times": (
        "scaled by the size of pipeline",
        "the gradient of all parameters is 2 times that of one process in step 1: the 2 ranks of pipeline train on the "
        "same samples, and a gradient must not grow with their number; it may have been added up over ranks that all "
        "have the whole of it",
    ),
    "loss-of-each-rank": (
        "a loss counted more than once",
        "the loss of step 1 is 2 times that of one process, while every microbatch's loss is the same: the 2 ranks of "
        "pipeline have the same microbatches, and the loss of each is counted",
    ),
    "other-samples": (
        "other samples on ranks that share the work",
        "1 rank (0) got other microbatches in step 1 than the ranks with which they split the work (pipeline 2); all "
        "of them must read the same share",
    ),
}
"""Kind of fault and sentence (or its end), by planted fault, for a pipeline of two stages."""

PARTS = {
    "rows-not-added": (
        "a partial sum that is not added up",
        "in step 1 the outputs of blocks.0.out on the 2 ranks of tensor differ, and their sum is the output of one "
        "process: it is cut into rows, and nothing adds up the parts",
    ),
    "columns-not-added": (
        "a partial gradient that is not added up",
        "in step 1 the ranks of tensor have different gradients of the output of blocks.3.norm2, and their sum is in "
        "proportion to that of one process: what it is given to is cut into columns, and nothing adds up the parts in "
        "the backward pass",
    ),
    "bias-of-each-rank": (
        "a bias added several times",
        "in step 1 the output of blocks.0.out contains its bias 2 times: each of the 2 ranks of tensor adds it to its "
        "part of the sum, and only one must",
    ),
    "whole-added-up": (
        "scaled by the size of tensor",
        "the gradient of 16 parameters (blocks.0.norm1.weight, blocks.0.norm1.bias, blocks.0.norm2.weight and 13 more) "
        "is 2 times that of one process in step 1: the 2 ranks of tensor train on the same samples, and a gradient "
        "must not grow with their number; it may have been added up over ranks that all have the whole of it",
    ),
    "other-columns": (
        "a wrong plan",
        ", and what can be compared before it is right: in it, or between it and that, a matrix is cut in the wrong "
        "way (columns as rows, or the wrong columns together); say in the task's tensor(model) what is to stay whole",
    ),
    "copies-apart": (
        "copies that differ",
        "after step 1, blocks.1.norm2.weight differs between ranks 0 and 1, which keep copies of it along tensor: "
        "their gradients of a parameter that is not cut must be equal before the update",
    ),
    "norm-counts-twice": (
        "a norm that counts copies twice",
        ", while all gradients are right: every copy of token.weight, blocks.0.norm1.weight, blocks.0.norm1.bias and "
        "24 more counts, on up to 2 ranks, and each parameter must count once",
    ),
    "loss-of-each-rank": (
        "a loss counted more than once",
        "the loss of step 1 is 2 times that of one process, while every microbatch's loss is the same: the 2 ranks of "
        "tensor have the same microbatches, and the loss of each is counted",
    ),
}
"""The same for matrices that two ranks split."""

SEQUENCES = {
    "world-times": (
        "scaled by the size of context",
        "the gradient of all parameters is 2 times that of one process in step 1: the 2 ranks of context train on the "
        "same samples, and a gradient must not grow with their number; it may have been added up over ranks that all "
        "have the whole of it",
    ),
}
"""The same for sequences that two ranks split."""

POSITIONS = {
    "norm-not-summed": (
        "a partial gradient that is not added up",
        "differ between ranks 0 and 1, which split the sequence along tensor: each rank's gradient of a parameter that "
        "is not cut comes from its own positions, and the parts must be added up before the update",
    ),
    "bias-counted-again": (
        "scaled by the size of tensor",
        "is 2 times that of one process in step 1: the 2 ranks of tensor train on the same samples, and a gradient "
        "must not grow with their number; it may have been added up over ranks that all have the whole of it",
    ),
}
"""The same for sequences that the two ranks of tensor split."""

AT_ONCE = ("tied-not-summed", "rows-not-added")
"""Faults that are planted whenever tests run; the others are in the sweeps."""


def faults(planted: Mapping[str, Any]) -> list[Any]:
    """Return the faults as parameters of a test."""
    return [pytest.param(f, marks=[] if f in AT_ONCE else [pytest.mark.sweep]) for f in planted]


def rows_of_strategies(forks: Forks, folder: Path, strategies: list[str], **args: Any) -> dict[str, Any]:
    """Verify a small GPT over three steps; return the verdicts by strategy."""
    _, said = verified(forks, folder, "tests.support.stacked:Stacked", strategies, steps=3, backend="faulty", **args)
    return {row["strategy"]: row for row in said["strategies"]}


def planted(request: pytest.FixtureRequest, folder: Path, forks: Forks, axis: str, **args: Any) -> dict[str, Any]:
    """Verify a strategy without a fault, and one with each fault of this axis that the collected tests ask for."""
    asked = [i.callspec.params["fault"] for i in request.session.items if f"_{axis}[" in i.name]  # type: ignore[attr-defined]
    return rows_of_strategies(
        forks, folder, [f"faulty/nothing+{fault}+{axis}2" for fault in ("healthy-mesh", *asked)], **args
    )


def check(rows: dict[str, Any], axis: str, fault: str, expected: tuple[str, str]) -> None:
    row = rows[f"faulty/nothing+{fault}+{axis}2"]
    assert row["outcome"] == "disagrees", row
    kind, says = expected
    assert (row["finding"]["kind"], row["finding"]["says"][-len(says) :]) == (kind, says)


@pytest.fixture(scope="module")
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """Verdicts on a pipeline of two stages; tied weights, dropout, BatchNorm."""
    folder = tmp_path_factory.mktemp("stages")
    return planted(request, folder, forks, "pipeline", tied=True, dropout=0.2, batch_norm=True)


@pytest.fixture(scope="module")
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """Verdicts on blocks that two ranks split; tied weights, dropout."""
    return planted(request, tmp_path_factory.mktemp("parts"), forks, "tensor", tied=True, dropout=0.2)


@pytest.fixture(scope="module")
def sequences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """Verdicts on sequences that two ranks split; tied weights, dropout."""
    return planted(request, tmp_path_factory.mktemp("sequences"), forks, "context", tied=True, dropout=0.2)


@pytest.mark.parametrize("fault", faults(STAGES))
def test_a_fault_of_a_pipeline(stages: dict[str, Any], fault: str) -> None:
    """Each is found, with its kind and the figures that show it."""
    check(stages, "pipeline", fault, STAGES[fault])


def test_a_right_pipeline_agrees(stages: dict[str, Any]) -> None:
    """With BatchNorm, tied weights and dropout nothing is named: buffers, copies and masks are those of one process."""
    row = stages["faulty/nothing+healthy-mesh+pipeline2"]
    assert (row["outcome"], row["finding"]) == ("agrees", None)
    assert {"buffer", "ranks' copies"} <= row["shares"].keys()


@pytest.mark.parametrize("fault", faults(PARTS))
def test_a_fault_of_tensor(parts: dict[str, Any], fault: str) -> None:
    """Each is found, with its kind and the figures that show it."""
    check(parts, "tensor", fault, PARTS[fault])


def test_right_parts_agree(parts: dict[str, Any]) -> None:
    """A fused projection, tied weights and dropout inside of blocks that are cut: nothing is named."""
    row = parts["faulty/nothing+healthy-mesh+tensor2"]
    assert (row["outcome"], row["finding"]) == ("agrees", None)


@pytest.fixture(scope="module")
def positions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """Verdicts on sequences that the ranks of tensor split; tied weights, dropout."""
    folder = tmp_path_factory.mktemp("positions")
    strategies = [f"faulty/nothing+{fault}+tensor2+sequence" for fault in ("healthy-mesh", *POSITIONS)]
    return rows_of_strategies(forks, folder, strategies, tied=True, dropout=0.2)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", POSITIONS)
def test_a_fault_of_split_positions(positions: dict[str, Any], fault: str) -> None:
    """Each is found, with its kind and the figures that show it; without a fault nothing is named."""
    row = positions[f"faulty/nothing+{fault}+tensor2+sequence"]
    assert row["outcome"] == "disagrees", row
    kind, says = POSITIONS[fault]
    assert (row["finding"]["kind"], row["finding"]["says"][-len(says) :]) == (kind, says)
    assert positions["faulty/nothing+healthy-mesh+tensor2+sequence"]["outcome"] == "agrees"


@pytest.mark.sweep
@pytest.mark.parametrize("fault", faults(SEQUENCES))
def test_a_fault_of_context(sequences: dict[str, Any], fault: str) -> None:
    """Each is found, with its kind and the figures that show it; without a fault nothing is named."""
    check(sequences, "context", fault, SEQUENCES[fault])
    assert sequences["faulty/nothing+healthy-mesh+context2"]["outcome"] == "agrees"


@pytest.mark.sweep
def test_a_skip_across_a_cut(tmp_path: Path, forks: Forks) -> None:
    """In an engine that cuts there without a proof it is named; the native one cuts where the skip does not cross."""
    rows = rows_of_strategies(
        forks, tmp_path, ["faulty/nothing+skip-across-cut+pipeline2", "native/nothing+pipeline2"], skip=True
    )
    finding = rows["faulty/nothing+skip-across-cut+pipeline2"]["finding"]
    assert (finding["kind"], finding["forward"]) == ("a skip across a cut", "blocks.3 (rank 1, microbatch 1)")
    assert finding["says"].startswith(
        "in step 1 blocks.3 in stage 1 gets another input 2 than in one process, although "
    )
    assert rows["native/nothing+pipeline2"]["outcome"] == "agrees"
