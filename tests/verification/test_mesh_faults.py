"""Faults of ranks that share the work on the same samples: `verify` finds each and names it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks

ROOT = Path(__file__).parents[2]

STAGES = {
    "tied-not-summed": (
        "a tied gradient not summed",
        "after step 1, token.weight differs between stage 0 and stage 1, which both use it: each stage updates it by "
        "its own part of the gradient, and the parts must be added up first",
    ),
    "norm-counts-twice": (
        "a norm that counts copies twice",
        ", while all gradients are right: every copy of token.weight counts, on up to 2 ranks, and each parameter must "
        "count once",
    ),
    "same-masks": (
        "the same dropout masks on two stages",
        "in step 1, microbatch 1 of the batch, stage 1 draws the masks of the first stage again, from the first on: "
        "the state of the random generator must travel with the hidden states",
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
    "stale-statistics": (
        "a stage's stale running statistics",
        "after step 3, 4 buffers (blocks.2.statistics.running_mean, blocks.2.statistics.running_var, "
        "blocks.3.statistics.running_mean and 1 more) are still what they were before the first step: they come from a "
        "rank that does not run these modules, not from their own stage",
    ),
}
"""Kind of fault and sentence (or its end), by planted fault, for a pipeline of two stages."""


def verified(forks: Forks, folder: Path, cells: list[str], **args: Any) -> dict[str, Any]:
    """Verify a small GPT on two ranks over three steps; return the verdicts by cell."""
    config = {
        "task": {"use": "tests.support.stacked:Stacked", "args": args},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 16, "micro": 4},
        "train": {"steps": 20, "optimizer": {"name": "adamw", "lr": 1e-2, "decay": "matrices"}, "clip": 0.3},
        "out": str(folder / "out"),
    }
    (folder / "c.yaml").write_text(json.dumps(config), "utf-8")
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "faulty"), str(ROOT)])
    words = [word for cell in cells for word in ("--cells", cell)]
    done = forks.unipar(["verify", str(folder / "c.yaml"), "--steps", "3", *words], {"PYTHONPATH": path})
    file = folder / "out" / "verify" / "verify.json"
    assert file.exists(), done.stdout + done.stderr
    return {row["cell"]: row for row in json.loads(file.read_text("utf-8"))["cells"]}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """Verdicts on a pipeline of two stages with each fault, and without; tied weights, dropout, BatchNorm."""
    cells = [f"faulty/nothing+{fault}+pipeline2" for fault in ("healthy-mesh", *STAGES)]
    folder = tmp_path_factory.mktemp("stages")
    return verified(forks, folder, cells, tied=True, dropout=0.2, batch_norm=True)


@pytest.mark.parametrize("fault", STAGES)
def test_a_fault_of_a_pipeline_is_named(stages: dict[str, Any], fault: str) -> None:
    """Each is found, with its kind and the figures that show it."""
    row = stages[f"faulty/nothing+{fault}+pipeline2"]
    assert row["outcome"] == "disagrees", row
    kind, says = STAGES[fault]
    assert (row["finding"]["kind"], row["finding"]["says"][-len(says) :]) == (kind, says)


def test_a_right_pipeline_agrees(stages: dict[str, Any]) -> None:
    """With BatchNorm, tied weights and dropout nothing is named: buffers, copies and masks are those of one process."""
    row = stages["faulty/nothing+healthy-mesh+pipeline2"]
    assert (row["outcome"], row["finding"]) == ("agrees", None)
    assert {"buffer", "ranks' copies"} <= row["shares"].keys()


def test_a_skip_across_a_cut(tmp_path: Path, forks: Forks) -> None:
    """The proof before the first step refuses it; in an engine without a proof it is named."""
    rows = verified(
        forks, tmp_path, ["faulty/nothing+skip-across-cut+pipeline2", "native/nothing+pipeline2"], skip=True
    )
    finding = rows["faulty/nothing+skip-across-cut+pipeline2"]["finding"]
    assert (finding["kind"], finding["forward"]) == ("a skip across a cut", "blocks.3 (rank 1, microbatch 1)")
    assert finding["says"].startswith(
        "in step 1 blocks.3 in stage 1 gets another input 2 than in one process, although "
    )
    refused = rows["native/nothing+pipeline2"]
    assert refused["outcome"] == "failed"
    assert refused["note"].startswith("split as planned, the model is another: a loss of ")
