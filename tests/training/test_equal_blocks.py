"""Equal blocks run only once on fake tensors: their record is that of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from tests.support.short_text import short_text
from tests.support.world import ROOT
from unipar.backend.offered_strategies import config_in_strategy, expand_strategy_patterns
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.training.fake_run import trace_task as trace_module
from unipar.training.fake_run.repeats import EqualBlocks, ShortModel, find_equal_blocks
from unipar.training.fake_run.task_traces import TaskTraces
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
        numbers.append(len(blocks or (fake if part is None else part).blocks))
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
    assert numbers == [3, 4, 3, 3]
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
        ("Sequential(*(Block() for _ in range(6)))", "x = self.blocks(x)", [3, 4, 3, 3]),
        # the model wants all of them
        ("ModuleList(Block() for _ in range(6))", "for i in range(6): x = self.blocks[i](x)", [3, 6, 6, 6]),
        # all outputs are used at the end: blocks in the middle are not alike
        (
            "ModuleList(Block() for _ in range(6))",
            "kept = [x]\n        for b in self.blocks: kept.append(b(kept[-1]))\n        x = torch.stack(kept).mean(0)",
            [3, 4, 6, 6, 6],
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


PARTS = [
    ("native/nothing+tensor2", 2, {}, [3, 4, 3, 4]),
    # what the first and last blocks of a part do beside others' takes one block more on each side
    ("native/nothing+context2", 2, {}, [3, 4, 5, 6, 5, 6]),
    ("native/parameters+tensor2+pipeline2", 4, {"layers": 12}, [3, 4, 3, 4, 3, 4, 3, 4]),
    ("native/nothing+pipeline2", 2, {"precision": "bf16-mixed", "layers": 14}, []),
    ("native/parameters+expert2", 2, {"experts": True}, [6, 8, 6, 8, 6, 8, 6, 8]),
]


@pytest.mark.parametrize(
    ("strategy", "ranks", "settings", "expected"),
    [*PARTS[:2], *(pytest.param(*part, marks=pytest.mark.sweep) for part in PARTS[2:4]), PARTS[4]],
)
def test_parts_run_few_of_their_blocks(
    monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, settings: dict[str, Any], expected: list[int]
) -> None:
    """The outcome is that of a part whose blocks all run: allocations, moments, traffic, and the worst routing."""
    config = in_strategy(strategy, ranks, **settings)
    runs: list[int] = []
    parts = [parts_of(monkeypatch, config, runs)]
    all_run(monkeypatch)
    parts.append(parts_of(monkeypatch, config, []))
    assert runs == expected or not expected
    for few, every in zip(*parts, strict=True):
        assert few.timeline == every.timeline
        assert few.sent == every.sent
        assert few.activations.moments == every.activations.moments
        assert few.activations.flops == every.activations.flops
        assert few.rank.whole.sent_on == every.rank.whole.sent_on
        assert levels_of(few) == levels_of(every)


def in_strategy(name: str, ranks: int, precision: str = "fp32", experts: bool = False, layers: int = 7) -> Config:
    task = {
        "use": f"{ROOT}/tests/support/expert_models.py:OfTransformers",
        "args": {"name": "Mixtral", "kernel": "grouped_mm", "auxiliary": False, "num_hidden_layers": 5},
    }
    config = {
        "task": task if experts else short_text(layers=layers),
        "batch": {"total": 8, "micro": 2},
        "device": "cpu",
        "train": {"steps": 1, "precision": precision},
        "parallel": {"data": ranks},
    }
    (strategy,) = expand_strategy_patterns((name,))
    return config_in_strategy(load_given_config(config).config, strategy)


def parts_of(monkeypatch: pytest.MonkeyPatch, config: Config, runs: list[int]) -> Sequence[TracedTask]:
    """Return the parts that ranks have; `runs` gets the number of blocks of each fake run."""
    traces = TaskTraces(config, 2)
    with monkeypatch.context() as patch:
        numbers = runs_of_blocks(patch)
        parts = traces.of(config)
    runs += numbers
    return parts


def levels_of(part: TracedTask) -> list[list[float]]:
    routings = [part.activations, *([part.worst_routing] if part.worst_routing else [])]
    return [each.levels(micro).tolist() for each in routings for micro in (2, 5)]


def test_equal_blocks_are_found() -> None:
    """Neighbours that are blocks; a place is no setting; shared parameters are not taken apart."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    for number, layer in enumerate(layers):
        layer.layer_idx = number  # pyright: ignore[reportArgumentType]
    model = nn.ModuleDict({"a": layers, "b": nn.ModuleList(nn.Linear(2, 2) for _ in range(6))})
    names = [*(f"a.{number}" for number in range(5)), *(f"b.{number}" for number in range(6))]
    keys = ("0", "1", "2", "3", "4", "5")
    assert find_equal_blocks(model, names) == [EqualBlocks("a", keys[:5], 0), EqualBlocks("b", keys, 5)]
    assert find_equal_blocks(model, names[1:]) == [EqualBlocks("b", keys, 4)]
    assert find_equal_blocks(model, names[:-1]) == [EqualBlocks("a", keys[:5], 0), EqualBlocks("b", keys[:5], 5)]
    layers[3].weight = layers[1].weight
    assert find_equal_blocks(model, names) == [EqualBlocks("b", keys, 5)]


def test_blocks_inside_of_blocks_are_repeated_with_them() -> None:
    """Only where each of the equal ones has the same, and they come before it."""
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(5))
    names = [name for number in range(5) for name in (f"{number}.0", f"{number}")]
    (equal,) = find_equal_blocks(model, names)
    assert equal == EqualBlocks("", ("0", "1", "2", "3", "4"), 0, ("0",))
    assert ShortModel(model, names, [equal], 1).left_out == {"2", "2.0", "3", "3.0"}
    assert find_equal_blocks(model, names[1:]) == []


def test_blocks_that_are_few_or_differ_run_all() -> None:
    """Of four, none is left out; a block whose setting is another is another block."""
    names = ["0", "1", "2", "3", "4"]
    alike = nn.Sequential(*(nn.LeakyReLU(0.1) for _ in names))
    assert find_equal_blocks(alike, names) == [EqualBlocks("", tuple(names), 0)]
    assert find_equal_blocks(alike[:4], names[:4]) == []
    alike[2] = nn.LeakyReLU(0.2)
    assert find_equal_blocks(alike, names) == []


def test_a_short_model_is_whole_again() -> None:
    """The first blocks and the last are there while it is open, under their names, and counted from 0."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    names, whole = [str(n) for n in range(6)], list(model)
    short = ShortModel(model, names, find_equal_blocks(model, names), 1)
    assert short.blocks == ("0", "1", "5")
    with short.open():
        assert list(model) == [whole[0], whole[1], whole[5]]
        assert model[2] is whole[5]
        assert model.get_submodule("5") is whole[5]
        assert list(cast("nn.Sequential", model[1:])) == [whole[1], whole[5]]
    assert list(model) == whole
    assert type(model) is nn.Sequential


def test_more_of_few_blocks_are_not_left_out() -> None:
    """Where two on each side are to run, six are too few to leave one out."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    names = [str(n) for n in range(6)]
    assert ShortModel(model, names, find_equal_blocks(model, names), 2).blocks == tuple(names)
