"""A run that goes on with another optimizer: refused, or begun without the old one's state once that was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from tests.support.running import Line, running
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.errors import CheckpointError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

SGD = {"name": "sgd", "lr": 1e-3, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 1e-2}


class Two(Line):
    """Two parts, each with its own optimizer."""

    @override
    def model(self) -> Any:
        return {"one": nn.Linear(1, 1), "other": nn.Linear(1, 1)}

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            run.step(local_batch, part="one")
            run.step(local_batch, part="other", loss=self.loss)


class Own(Line):
    """Task that makes an optimizer of its own."""

    made: Any = torch.optim.RMSprop

    @override
    def optimizer(self, groups: Any) -> Any:
        return self.made(groups)


class OwnAdam(Own):
    made = torch.optim.AdamW


class OwnSGD(Own):
    made = torch.optim.SGD


def trained(task: Line, folder: Path, said: tuple[str, ...] = (), **sections: Any) -> None:
    folder.mkdir()
    (folder / "launch.json").write_text(json.dumps({"said": said}), encoding="utf-8")
    with running(task, folder, **sections) as run:
        task.train(run)


def went_on(folder: Path, first: Any, again: Any, said: tuple[str, ...] = ()) -> list[str]:
    """Return the sentences on what has changed, of a run of 4 steps after one of 2; each a task and section `train`."""
    (task, train), (other, changed) = first, again
    trained(task, folder / "first", train={"steps": 2, **train}, checkpoint={})
    path = folder / "first/checkpoints/step-00000002"
    trained(other, folder / "again", said, train={"steps": 4, **changed}, resume=str(path))
    rows = list(RunLog.read(run_log_path(folder / "again", 0)))
    assert [row["step"] for row in rows if row["event"] == "step"] == [3, 4]
    (row,) = [row for row in rows if row["event"] == "resumed"]
    return row["told"]


def refused(folder: Path, first: Any, again: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        went_on(folder, first, again)
    return str(caught.value).replace(str(folder / "first/checkpoints/step-00000002"), "PATH")


OF_PART = {"optimizer": SGD, "parts": {"other": {"optimizer": SGD}}}


@pytest.mark.parametrize(
    ("now", "key"),
    [
        ({"optimizer": SGD, "parts": {"other": {"optimizer": ADAMW}}}, "train.parts.other.optimizer.name"),
        ({"optimizer": ADAMW, "parts": {"other": {"optimizer": SGD}}}, "train.optimizer.name"),
    ],
)
def test_the_optimizer_of_a_part_is_as_it_was(tmp_path: Path, now: Any, key: str) -> None:
    """Another one is refused, and the key named that says it again."""
    assert refused(tmp_path, (Two(), OF_PART), (Two(), now)) == (
        f"checkpoint PATH: {key} was 'sgd' and is 'adamw': going on would train something else; take the old value "
        f"back, or say the new one again with --set {key}='adamw'"
    )


def test_a_part_that_gets_its_section_keeps_its_optimizer(tmp_path: Path) -> None:
    """Before it had the one of train.optimizer, and the same name is no change."""
    told = went_on(tmp_path, (Two(), {"optimizer": SGD}), (Two(), OF_PART))
    assert not any("without state" in sentence for sentence in told)


def test_one_that_was_said_begins_without_state(tmp_path: Path) -> None:
    """The other part keeps its own state; before, AdamW ended at once, as it missed its moments."""
    now = {"optimizer": SGD, "parts": {"other": {"optimizer": ADAMW}}}
    told = went_on(tmp_path, (Two(), OF_PART), (Two(), now), ("train.parts.other.optimizer.name",))
    assert told[0] == "train.parts.other.optimizer.name was 'sgd' and is 'adamw'"
    assert told[-1] == "the optimizer of 'other' was SGD and is AdamW: it begins without state"


@pytest.mark.parametrize(("before", "now"), [(SGD, ADAMW), (ADAMW, SGD)])
def test_the_only_optimizer_begins_without_state(tmp_path: Path, before: Any, now: Any) -> None:
    """In both directions: nothing of the old one's state is kept, nor saved again."""
    run = (Line(), {"optimizer": before}), (Line(), {"optimizer": now})
    told = went_on(tmp_path, *run, ("train.optimizer.name",))
    names = {"sgd": "SGD", "adamw": "AdamW"}
    sentence = f"the optimizer was {names[before['name']]} and is {names[now['name']]}: it begins without state"
    assert told[-1] == sentence


def test_the_tasks_own_optimizer_is_as_it_was(tmp_path: Path) -> None:
    """Its class is in the checkpoint; another one is refused, or begins without state if the rate is said again."""
    rate = {"optimizer": {"lr": 0.01}}
    assert refused(tmp_path, (Own(), rate), (OwnSGD(), rate)) == (
        "checkpoint PATH: the optimizer was RMSprop and is SGD, whose state is another: go on with the old one, or say "
        "the rate of the new one with --set train.optimizer.lr=0.01, and it begins without state"
    )
    state = inspect_checkpoint(tmp_path / "first/checkpoints/step-00000002").state
    assert state["parts"]["model"]["optimizer"] == "RMSprop"
    (tmp_path / "said").mkdir()
    told = went_on(tmp_path / "said", (OwnSGD(), rate), (Own(), rate), ("train.optimizer.lr",))
    assert told == ["the optimizer was SGD and is RMSprop: it begins without state"]


def test_the_same_class_made_by_the_task_keeps_its_state(tmp_path: Path) -> None:
    """AdamW of the config and of the task's optimizer() are one."""
    assert went_on(tmp_path, (Line(), {"optimizer": ADAMW}), (OwnAdam(), {"optimizer": {"lr": 0.01}})) == []
