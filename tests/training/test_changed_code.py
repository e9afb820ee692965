"""A run that goes on with code that has changed since the checkpoint, where names and shapes are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.support.running import Line, running


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
