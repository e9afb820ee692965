"""Trials in worlds of their own, within a limit that the meter enforces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unipar
from benchmarks.micro_batch import STRATEGIES, search_by_auto, search_by_hand, world_of
from tests.support.wide import Wide
from unipar.errors import OutOfMemory
from unipar.launcher.micro_batch.trials import TrialCode
from unipar.run_folder.layout import read_launch_file, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task.reference import TaskRef

MIB = 2**20
NAME = "native/nothing on 2 ranks"
CONFIG: dict[str, Any] = {
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 16, "micro": "auto", "memory": "64MiB"},
    "train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.01}},
    "out": "run",
}


@pytest.mark.usefixtures("forked")
def test_the_largest_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan knows what fits, a trial confirms it, and the run has it in its run log."""
    monkeypatch.chdir(tmp_path)
    unipar.launch(CONFIG, task=Wide)
    found = read_launch_file(Path("run"))["micro"]
    assert [(trial["micro"], trial["fits"]) for trial in found["trials"]] == [(4, True)]
    (noted,) = (row for row in RunLog.read(run_log_path(Path("run"), 0)) if row["event"] == "micro")
    assert (noted["micro"], noted["limit"], noted["planned"]) == (4, int(64 * MIB * 0.95), {NAME: 4})
    assert 0.5 * 64 * MIB < noted["trials"][0]["peak"] <= noted["limit"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"batch.micro: auto: trying 4 of 8 in {NAME}"
    assert [line.partition(";")[0] for line in lines[3:4]] == ["batch.micro: auto: 4 of 8, after 1 trial"]


@pytest.mark.sweep
def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers, and what would need less; no run has begun."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutOfMemory) as e:
        unipar.launch({**CONFIG, "batch": {"total": 2, "micro": "auto", "memory": "12MiB"}}, task=Wide, quiet=True)
    assert str(e.value).startswith(
        f"batch.micro: auto: nothing fits in 11 MiB a rank, and 15 MiB are needed by the plan: in {NAME}, with a "
        "microbatch of 1, rank "
    )
    assert str(e.value).endswith(
        "; by an estimate native/gradients (parameters, gradients and optimizer 3.0 MiB a rank, here 4.0 MiB) would "
        "have fitted"
    )
    assert not Path("run").exists()


@pytest.mark.sweep
@pytest.mark.parametrize("limit", [32, 64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_auto_picks_what_a_search_by_hand_finds(strategy: str, limit: int) -> None:
    """Under every backend."""
    world = world_of(strategy)
    code = TrialCode(TaskRef.of(None, world.settled.config.task, {}))
    assert search_by_auto(world, code, limit * MIB)[0] == search_by_hand(world, code, limit * MIB)[0]
