"""Trained model of a run, loaded on one process: from checkpoints of any strategy, or a sentence why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import unipar
from tests.support.running import Line
from tests.support.world import ROOT
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.errors import CheckpointError, TaskError
from unipar.results.run_report import Report

pytestmark = pytest.mark.forked

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 4},
    "data": {"shuffle": False},
    "train": {"steps": 2, "optimizer": {"name": "sgd", "lr": 0.01}},
    "checkpoint": {},
}


class Normed(Line):
    """Line with a buffer, tied weights and a frozen layer."""

    @override
    def model(self) -> Any:
        made = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
        made[2].weight = made[1].weight  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]
        made[3].requires_grad_(False)
        return made


class Two(Line):
    """Two lines, of which each step trains both."""

    @override
    def model(self) -> Any:
        return {"first": super().model(), "second": super().model()}

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            run.step(local_batch, part="first")
            run.step(local_batch, part="second", loss=self.loss)


def _weight_by_hand(steps: int) -> float:
    weight = 0.5
    for step in range(steps):
        x = torch.arange(1.0, 11.0)[4 * step : 4 * step + 4]
        weight -= 0.01 * (2 * (weight * x - 2 * x) * x).mean().item()
    return weight


class Half(Line):
    """Line that begins at 0.5."""

    @override
    def model(self) -> Any:
        made = super().model()
        nn.init.constant_(made.weight, 0.5)
        return made


@pytest.mark.parametrize("strategy", ["native/nothing", "native/parameters"])
def test_whole_or_sharded(tmp_path: Path, strategy: str) -> None:
    """The weights are those that a loop by hand trains, whether ranks saved them whole or in shards."""
    backend, shard = strategy.split("/")
    more = {"backend": backend, "parallel.shard": shard, "out": str(tmp_path / "run")}
    report = unipar.launch(CONFIG, task=Half, overrides=more, quiet=True)
    drawn = torch.get_rng_state()
    model = report.load()
    assert isinstance(model, nn.Linear)
    assert model.weight.item() == pytest.approx(_weight_by_hand(2), abs=1e-6)
    assert (model.training, model.weight.requires_grad) == (False, True)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert report.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000002"


def test_buffers_tied_weights_and_a_broken_checkpoint(tmp_path: Path) -> None:
    """Everything comes from the newest checkpoint whose bytes are what was saved."""
    more = {"out": str(tmp_path), "checkpoint.every": 1}
    report = unipar.launch(CONFIG, task=Normed, overrides=more, quiet=True, overwrite=True)
    model: Any = report.load()
    assert model[1].weight is model[2].weight
    assert model[0].num_batches_tracked == 2
    assert not model[3].weight.requires_grad
    shard = tmp_path / "checkpoints" / "step-00000002" / "shards" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    model = report.load()
    assert model[0].num_batches_tracked == 1


def test_several_parts(tmp_path: Path) -> None:
    """All parts come as one module, or one by its name."""
    report = unipar.launch(CONFIG, task=Two, overrides={"out": str(tmp_path / "run")}, quiet=True)
    whole: Any = report.load()
    assert {*whole} == {"first", "second"}
    assert torch.equal(whole["second"].weight, report.load("second").get_parameter("weight"))
    with pytest.raises(TaskError) as e:
        report.load("third")
    assert str(e.value) == "load('third'): model() returned no part of that name; it has first, second"


def test_averages(tmp_path: Path) -> None:
    """`averages` loads those of train.ema, and is refused without them."""
    more = {"out": str(tmp_path / "run"), "train.ema": {"decay": 0.5}}
    report = unipar.launch(CONFIG, task=Half, overrides=more, quiet=True)
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    with SavedState(path, inspect_checkpoint(path).manifest) as saved:
        assert torch.equal(report.load(averages=True).get_parameter("weight"), saved.whole("weight", "average"))
        assert torch.equal(report.load().get_parameter("weight"), saved.whole("weight", "weight"))
    report = unipar.launch(CONFIG, task=Half, overrides={"out": str(tmp_path / "other")}, quiet=True)
    with pytest.raises(CheckpointError) as e:
        report.load(averages=True)
    assert str(e.value).endswith("step-00000002 has no averages: give the config train.ema and train again")


def test_nothing_was_saved(tmp_path: Path) -> None:
    """The error says what makes a run save its weights."""
    more = {"out": str(tmp_path / "run"), "checkpoint": None}
    with pytest.raises(CheckpointError) as e:
        unipar.launch(CONFIG, task=Half, overrides=more, quiet=True).load()
    assert str(e.value) == (
        f"{tmp_path}/run has saved no checkpoint, so there is no trained model to load: give the config a section "
        "checkpoint (`checkpoint: {}` saves at the end) and train again"
    )


def test_later_from_the_folder(tmp_path: Path) -> None:
    """A report that is read from a folder imports the task as its ranks did; code in a script that joins is refused."""
    out, argv = tmp_path / "run", list(sys.argv)
    task = {"use": f"{ROOT}/tests/support/running.py:Line"}
    unipar.launch({**CONFIG, "task": task}, overrides={"out": str(out)}, quiet=True)
    assert isinstance(Report.read(out).load(), nn.Linear)
    assert sys.argv == argv
    launched = json.loads((out / "launch.json").read_text("utf-8"))
    del launched["task"]
    (out / "launch.json").write_text(json.dumps(launched), "utf-8")
    with pytest.raises(TaskError) as e:
        Report.read(out).load()
    assert str(e.value) == (
        f"the code of {out} is in a script that calls join(), from which its model cannot be made here: `unipar "
        "checkpoint export` writes its weights into a file that your own model loads"
    )


def test_another_model(tmp_path: Path) -> None:
    """A model that is not the checkpoint's is refused by name."""
    from dataclasses import replace

    report = unipar.launch(CONFIG, task=Half, overrides={"out": str(tmp_path / "run")}, quiet=True)
    with pytest.raises(CheckpointError, match=r"step-00000002 lacks 0\.num_batches_tracked \(buffer\), 0\.running"):
        replace(report, make_task=Normed).load()
