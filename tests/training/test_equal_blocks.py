"""Equal blocks run only once on fake tensors: their record is that of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.short_text import short_text
from unipar.config.config_source import load_given_config
from unipar.training.fake_run import trace_task as trace_module
from unipar.training.fake_run.repeats import EqualBlocks, ShortModel, find_equal_blocks
from unipar.training.fake_run.trace_task import TracedTask, trace_task

TASK = """
import torch
from torch import nn
from unipar import Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.inner(x).relu()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.{container}
    def forward(self, x):
        x = self.first(x)
        {run}
        return x

class Small(Task):
    def model(self):
        return Model()
    def data(self):
        return torch.utils.data.TensorDataset(torch.zeros(64, 4))
    def loss(self, model, batch):
        return model(batch[0]).mean()
"""


def traced(task: dict[str, Any], recompute: str = "none") -> TracedTask:
    config = {
        "task": task,
        "batch": {"total": 8},
        "device": "cpu",
        "train": {"steps": 1, "precision": "bf16-mixed"},
        "model": {"recompute": recompute},
    }
    return trace_task(load_given_config(config).config, 2)


def all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every block run."""

    def none(*_: object) -> list[EqualBlocks]:
        return []

    monkeypatch.setattr(trace_module, "find_equal_blocks", none)


def runs_of_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of blocks of each fake run."""
    numbers: list[int] = []
    run = trace_module.trace_step

    def counted(fake: Any, micro: int, part: Any = None, blocks: Any = None) -> Any:
        numbers.append(len(blocks or fake.blocks))
        return run(fake, micro, part, blocks)

    monkeypatch.setattr(trace_module, "trace_step", counted)
    return numbers


@pytest.mark.parametrize(
    "recompute",
    [pytest.param("none", marks=pytest.mark.sweep), "blocks", pytest.param("selective", marks=pytest.mark.sweep)],
)
def test_a_record_of_three_blocks_is_that_of_seven(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """Each allocation and moment, gradients by name, FLOPs."""
    task = short_text(layers=7)
    numbers = runs_of_blocks(monkeypatch)
    short = traced(task, recompute)
    assert numbers == [4, 3, 3, 3]
    all_run(monkeypatch)
    whole = traced(task, recompute)
    assert numbers[4:] == [7, 7, 7]
    assert short.timeline == whole.timeline
    assert short.activations.flops == whole.activations.flops
    assert short.activations.levels(5).tolist() == whole.activations.levels(5).tolist()
    of_short, of_whole = ([(b.size(5), b.operation) for b in x.activations.blocks] for x in (short, whole))
    assert of_short == of_whole


@pytest.mark.parametrize(
    ("container", "run", "numbers"),
    [
        ("Sequential(*(Block() for _ in range(6)))", "x = self.blocks(x)", [4, 3, 3, 3]),
        # the model wants all of them
        ("ModuleList(Block() for _ in range(6))", "for i in range(6): x = self.blocks[i](x)", [4, 6, 6, 6]),
        # all outputs are used at the end: blocks in the middle are not alike
        (
            "ModuleList(Block() for _ in range(6))",
            "kept = [x]\n        for b in self.blocks: kept.append(b(kept[-1]))\n        x = torch.stack(kept).mean(0)",
            [4, 3, 3, 3, 6, 6, 6],
        ),
    ],
)
def test_blocks_that_are_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str, run: str, numbers: list[int]
) -> None:
    """They run all, where few of them would not stand for the others; the outcome is the same."""
    file = tmp_path / "small.py"
    file.write_text(TASK.format(container=container, run=run), "utf-8")
    task = {"use": f"{file}:Small"}
    seen = runs_of_blocks(monkeypatch)
    short = traced(task)
    assert seen == numbers
    all_run(monkeypatch)
    whole = traced(task)
    assert short.timeline == whole.timeline
    assert short.activations.levels(3).tolist() == whole.activations.levels(3).tolist()


def test_equal_blocks_are_found() -> None:
    """In containers whose children are all blocks; a place is no setting; shared parameters are not taken apart."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    for number, layer in enumerate(layers):
        layer.layer_idx = number  # pyright: ignore[reportArgumentType]
    model = nn.ModuleDict({"a": layers, "b": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))})
    names = [f"{part}.{number}" for part in "ab" for number in range(5)]
    keys = ("0", "1", "2", "3", "4")
    assert find_equal_blocks(model, names) == [EqualBlocks("a", keys, 0), EqualBlocks("b", keys, 5)]
    assert find_equal_blocks(model, names[1:]) == [EqualBlocks("b", keys, 4)]
    layers[3].weight = layers[1].weight
    assert find_equal_blocks(model, names) == [EqualBlocks("b", keys, 5)]


def test_blocks_that_are_few_or_differ_run_all() -> None:
    """Of four, none is left out; a block whose setting is another is another block."""
    names = ["0", "1", "2", "3", "4"]
    alike = nn.Sequential(*(nn.LeakyReLU(0.1) for _ in names))
    assert find_equal_blocks(alike, names) == [EqualBlocks("", tuple(names), 0)]
    assert find_equal_blocks(alike[:4], names[:4]) == []
    alike[2] = nn.LeakyReLU(0.2)
    assert find_equal_blocks(alike, names) == []


def test_a_short_model_is_whole_again() -> None:
    """The first blocks and the last are there while it is open."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    names, whole = [str(n) for n in range(6)], list(model)
    short = ShortModel(model, names, find_equal_blocks(model, names), 3)
    assert short.blocks == ("0", "1", "5")
    with short.open():
        assert list(model) == [whole[0], whole[1], whole[5]]
    assert list(model) == whole
