"""`unipar verify` of a config with `train.ema`: averages are compared like any other state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.verifications import verified

AVERAGED = ["--set", "train.ema.decay=0.8", "--set", "train.ema.warmup=1"]
FAULTY = ("faulty/nothing", "faulty/nothing+stale-averages")


def test_averages_of_other_values_are_found_and_named(forks: Forks, tmp_path: Path) -> None:
    """An engine that is right agrees to the bit; one whose weights are right, and their averages not, is named."""
    done, said = verified(
        forks, tmp_path, "tests.conformance.tasks:Plain", FAULTY, steps=6, backend="faulty", more=AVERAGED
    )
    rows = {row["strategy"]: row for row in said["strategies"]}
    assert [rows[strategy]["outcome"] for strategy in FAULTY] == ["agrees", "disagrees"]
    assert rows[FAULTY[0]]["bits"] == "shares"
    found = rows[FAULTY[1]]["finding"]
    assert found["kind"] == "averages of other values"
    assert found["says"].startswith("the averages of train.ema differ after step 4, of ")
    assert done.returncode == 1


REAL = ("native/parameters", "deepspeed/gradients")
MORE = (
    *("native/optimizer", "native/nothing+tensor2", "native/nothing+pipeline2", "deepspeed/nothing"),
    *("deepspeed/parameters", "horovod/nothing", "accelerate/parameters", "accelerate/parameters+zero"),
)


@pytest.mark.parametrize("strategies", [REAL, pytest.param(REAL + MORE, marks=pytest.mark.sweep)], ids=["two", "all"])
@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.sweep), ["--resume"]], ids=["whole", "resumed"])
def test_every_library_agrees(forks: Forks, tmp_path: Path, strategies: tuple[str, ...], more: list[str]) -> None:
    """Also from a checkpoint of another strategy on."""
    done, said = verified(
        forks, tmp_path, "tests.support.stacked:Stacked", strategies, steps=4, backend="toy", more=AVERAGED + more
    )
    assert [(row["strategy"], row["outcome"]) for row in said["strategies"]] == [
        (strategy, "agrees") for strategy in strategies
    ]
    assert "average" in said["strategies"][0]["shares"]
    assert done.returncode == 0
