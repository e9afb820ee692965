"""Repeated blocks: found in the model, named by the task, or named by the config."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from unipar.config import Config
from unipar.errors import ConfigError, TaskError
from unipar.model.blocks import find_blocks, find_repeated_modules


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))


def _blocks(blocks: Any = "auto", names: list[str] | None = None) -> tuple[str, ...]:
    config = Config.model_validate({"batch": {"total": 1}, "train": {"steps": 1}, "model": {"blocks": blocks}})
    return find_blocks(_Stack(), config, patterns=names)


def test_found() -> None:
    """Layers of one class in a container are blocks; layers inside them and single layers are not."""
    assert find_repeated_modules(_Stack()) == ("layers.0", "layers.1", "layers.2")


def test_a_frozen_part_is_found_too() -> None:
    """Blocks are found in several submodules."""
    model = nn.ModuleDict({"student": _Stack(), "teacher": nn.Sequential(_Stack())})
    assert find_repeated_modules(model) == (
        "student.layers.0",
        "student.layers.1",
        "student.layers.2",
        "teacher.0.layers.0",
        "teacher.0.layers.1",
        "teacher.0.layers.2",
    )


def test_none_named_and_the_tasks_own() -> None:
    """The config wins over the task, and the task over the model; blocks inside blocks are left out."""
    assert _blocks("none", ["head"]) == ()
    assert _blocks(["layers.*"], ["head"]) == ("layers.0", "layers.1", "layers.2")
    assert _blocks("auto", ["head", "head.0"]) == ("head",)


def test_names_that_are_not_there() -> None:
    """The error for an unknown name lists the modules of the model."""
    has = "it has embed, layers, layers.0, layers.0.0, layers.0.1, layers.1, layers.1.0, layers.1.1 and 7 more"
    with pytest.raises(ConfigError) as e:
        _blocks(["blocks.*"])
    assert str(e.value) == f"model.blocks: no module of the model is called 'blocks.*'; {has}"
    with pytest.raises(TaskError) as f:
        _blocks("auto", ["tail"])
    assert str(f.value) == f"blocks() names 'tail', which the model does not have; {has}"
