"""A run that goes on with code that has changed since the checkpoint, where names and shapes are as they were."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.support.run_logs import rows_of
from tests.support.running import Line, running
from unipar.checkpoint.config_changes import describe_other_code


class WithState(Line):
    """Line with a state of its own, which load_state takes as it is."""

    def __init__(self) -> None:
        self.seen = 0

    @override
    def state(self) -> Any:
        return {"seen": self.seen}

    @override
    def load_state(self, state: Any) -> None:
        self.seen = state["seen"]


def trained(task: Line, folder: Path, **sections: Any) -> None:
    folder.mkdir()
    with running(task, folder, **sections) as run:
        task.train(run)


def test_a_state_that_is_new_begins_as_in_any_run(tmp_path: Path) -> None:
    """Without a saved state load_state is not called: it would get None, as from every import."""
    trained(Line(), tmp_path / "first", checkpoint={})
    task = WithState()
    path = tmp_path / "first/checkpoints/step-00000003"
    train = {"steps": 4, "optimizer": {"name": "sgd", "lr": 1e-3}}
    trained(task, tmp_path / "again", train=train, resume=str(path), checkpoint={})
    assert task.seen == 0
    task.seen = 7
    trained(task, tmp_path / "other", train=train, checkpoint={})
    task.seen = 0
    path = tmp_path / "other/checkpoints/step-00000004"
    trained(task, tmp_path / "last", train=train | {"steps": 5}, resume=str(path))
    assert task.seen == 7


TEXT = """
from torch import nn
from tests.support.running import Line

class Net(Line):
    def model(self):
        return nn.Sequential(nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1))
"""


def test_other_code_of_the_same_name_is_told(tmp_path: Path) -> None:
    """GELU became ReLU in a file that git does not know: names and shapes fit, and a line says it."""
    file = tmp_path / "net.py"
    train = {"steps": 4, "optimizer": {"name": "sgd", "lr": 1e-3}}
    path = str(tmp_path / "first/checkpoints/step-00000003")
    told: list[Any] = []
    for folder, text in (("first", TEXT), ("again", TEXT), ("other", TEXT.replace("GELU", "ReLU"))):
        file.write_text(text, encoding="utf-8")
        task = runpy.run_path(str(file))["Net"]()
        sections = {"checkpoint": {}} if folder == "first" else {"train": train, "resume": path}
        trained(task, tmp_path / folder, **sections)
        told += [row["told"] for row in rows_of(tmp_path / folder, "resumed")]
    assert told == [[], ["the code of the task's model or loss has changed since the checkpoint"]]


@pytest.mark.parametrize(
    ("saved", "sentences"),
    [
        ({}, []),
        ({"git": "b" * 40, "code_sha256": "new"}, []),
        ({"git": "a" * 40, "code_sha256": "new"},
         ["the code around the task may have changed since the checkpoint: it was at commit aaaaaaaaaaaa, and is at "
          "bbbbbbbbbbbb"]),
        ({"git": "b" * 40 + "-dirty", "code_sha256": "old"},
         ["the code of the task's model or loss has changed since the checkpoint: it was at commit bbbbbbbbbbbb-dirty, "
          "and is at bbbbbbbbbbbb"]),
    ],
)  # fmt: skip
def test_what_git_says_is_told(saved: dict[str, Any], sentences: list[str]) -> None:
    """Another commit is told with both; where the task's own files differ, that is said."""
    assert describe_other_code(saved, "b" * 40, "new") == sentences
