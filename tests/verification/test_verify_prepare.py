"""A task whose stream reads what `prepare` has written: whatever reads the data calls that first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.errors import TaskError
from unipar.verification.verify import verify

pytestmark = pytest.mark.forked

TASK = """
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

import unipar


class Lines(IterableDataset):
    def __init__(self, text):
        self.text = text

    def __iter__(self):
        for line in self.text.splitlines():
            yield torch.tensor([float(word) for word in line.split()])


class Written(unipar.Task):
    def __init__(self, folder):
        self.file = Path(folder, "numbers")

    def prepare(self):
        self.file.write_text("\\n".join(f"{i} {i % 3}" for i in range(40)), "utf-8")
        with open(f"{self.file}-calls", "a") as calls:
            calls.write("called\\n")

    def model(self):
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def data(self):
        return Lines(self.file.read_text("utf-8"))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[:, :1] / 40), batch[:, 1:])
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH_VARIABLE["PYTHONPATH"])
    (tmp_path / "written.py").write_text(TASK, "utf-8")
    return {
        "task": {"use": f"{tmp_path}/written.py:Written", "args": {"folder": str(tmp_path)}},
        "device": "cpu",
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 3},
        "out": str(tmp_path / "out"),
    }


def test_verify(config: dict[str, Any], tmp_path: Path) -> None:
    """The stream is read before a run is built; a second call might write what another world reads."""
    found = verify(config, strategies=["native/nothing", "native/gradients"], world=2, steps=3)
    assert [(row.outcome, row.finding) for row in found.rows] == [("agrees", None)] * 2
    assert (tmp_path / "numbers-calls").read_text("utf-8") == "called\n"


def test_plan(config: dict[str, Any]) -> None:
    """A plan reads samples of the data, too."""
    (row,) = unipar.plan(config, strategies=["native/nothing"], worlds=[2]).rows
    assert row.refusal == ""


def test_an_error_of_prepare(config: dict[str, Any], tmp_path: Path) -> None:
    """The error says that it is from there, with file and line."""
    config["task"]["args"]["folder"] = str(tmp_path / "none")
    with pytest.raises(TaskError) as e:
        unipar.plan(config, strategies=["native/nothing"], worlds=[2])
    assert str(e.value) == (
        f"prepare() raised FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/none/numbers' "
        f"({tmp_path}/written.py, line 25)"
    )
