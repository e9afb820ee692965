"""`unipar verify` of strategies whose ranks share the work on the same samples: each is compared with its own split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.verifications import verified

STRATEGIES = ("toy/nothing", "toy/nothing+tensor2", "toy/nothing+pipeline2", "toy/nothing+context2")


def verdicts(forks: Forks, folder: Path, task: str, strategies: tuple[str, ...], **args: Any) -> dict[str, Any]:
    """Verify a task over five steps, with a backend that has all axes; return verify.json."""
    done, said = verified(forks, folder, task, strategies, steps=5, backend="toy", **args)
    assert done.returncode == 0, done.stdout + done.stderr
    return said


def test_each_strategy_is_compared_with_its_own_number_of_shares(forks: Forks, tmp_path: Path) -> None:
    """Of 35 samples, 3 are left for the third batch: two ranks split it into other microbatches than one would."""
    said = verdicts(forks, tmp_path, "tests.conformance.tasks:Tokens", STRATEGIES, count=35)
    assert [(row["strategy"], row["outcome"], row["bits"]) for row in said["strategies"]] == [
        (strategy, "agrees", "shares") for strategy in STRATEGIES
    ]
    one_share = "a replay with 1 share, share by share, as configured"
    assert {name for name in said["one"] if name.startswith("a replay")} == {
        "a replay, share by share",
        "a replay, microbatch by microbatch",
        "a replay with 1 share, share by share",
        *(f"{one_share}, matrix products in {n} parts" for n in range(2, 7)),
        *(f"{one_share}, sequences in {n} parts" for n in range(2, 7)),
    }
    rows = {row["strategy"]: row for row in said["strategies"]}
    assert rows["toy/nothing"]["allowed"] == {}
    assert rows["toy/nothing+tensor2"]["allowed"]["norm"] != said["allowed"]["norm"]


@pytest.mark.sweep
def test_the_cut_of_a_batch_matters_by_strategy(forks: Forks, tmp_path: Path) -> None:
    """With BatchNorm each strategy is compared with one process that splits batches as that strategy does."""
    said = verdicts(forks, tmp_path, "tests.conformance.tasks:Normed", STRATEGIES[:2])
    assert [(row["outcome"], row["bits"]) for row in said["strategies"]] == [("agrees", "shares"), ("agrees", "shares")]
    assert said["base"] == "a replay, share by share, as configured"
    assert [row["base"] for row in said["strategies"]] == ["", "a replay with 1 share, share by share, as configured"]
    assert said["cut_dependence"]["kind"] == "batch statistics"


def test_all_ranks_refuse_alike(forks: Forks, tmp_path: Path) -> None:
    """No rank waits for one whose stage has nothing to train until launch.timeout: both have the sentence."""
    strategies, short = ["native/nothing+pipeline2"], ["--set", "launch.heartbeat=5", "--set", "launch.timeout=10"]
    _, said = verified(
        forks, tmp_path, "tests.support.unsplit:FrozenBelow", strategies, steps=1, backend="toy", more=short
    )
    (row,) = said["strategies"]
    assert (row["outcome"], row["note"].partition(" (")[0]) == (
        "refused",
        "stage 0 of the pipeline has no trained parameter",
    )


@pytest.mark.sweep  # a comparison with such a strategy is played always
def test_what_an_engine_refuses_is_no_failure(forks: Forks, tmp_path: Path) -> None:
    """Of a split that the proof refuses the row has the sentence, and the other strategies decide the exit code."""
    strategies = ["native/nothing", "native/nothing+tensor2"]
    where = {"where": "leave"}
    done, said = verified(
        forks, tmp_path, "tests.support.unsplit:Unsummed", strategies, steps=3, backend="toy", **where
    )
    rows = said["strategies"]
    assert [row["outcome"] for row in rows] == ["agrees", "refused"]
    assert rows[1]["note"].startswith("split as planned, the model is another: a loss of ")
    assert said["summary"] == "native/nothing agrees with one process over 3 steps on 2 ranks"
    assert (done.returncode, said["code"]) == (0, 0)
    assert "refused: split as planned, the model is" in done.stdout
    page = (tmp_path / "out/verify/report.html").read_text("utf-8")
    assert "refused: split as planned, the model is another: a loss of " in page
    assert "What is wrong" not in page
