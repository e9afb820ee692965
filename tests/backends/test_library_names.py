"""What each library's users call a strategy, as the tables of compare, verify, scale and plan show it."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.config import Config, Strategy
from unipar.config.settled import SettledConfig
from unipar.launcher.strategy_selection import library_names, select_strategies


def name_of(strategy: str, ranks: int = 2, **changed: Any) -> str:
    base = {"batch": {"total": 8}, "device": "cpu", "train": {"steps": 5}}
    config = Config.model_validate(base | changed)
    selected = select_strategies(SettledConfig.of(config, Strategy("native"), ranks, "cpu"), [strategy])
    return library_names(selected)[strategy]


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("single", "one process"),
        ("native/nothing", "DDP"),
        ("native/optimizer", "ZeroRedundancyOptimizer"),
        ("native/gradients", "FSDP2, no reshard"),
        ("native/parameters", "FSDP2"),
        ("native/nothing+tensor2", "TP"),
        ("deepspeed/nothing", "ZeRO-0"),
        ("deepspeed/parameters", "ZeRO-3"),
        ("deepspeed/gradients+library", "ZeRO-2"),
        ("horovod/nothing", "allreduce"),
        ("accelerate/nothing", "DDP"),
        ("accelerate/gradients", "FSDP2, no reshard"),
        ("accelerate/parameters+zero", "ZeRO-3"),
    ],
)
def test_name(strategy: str, name: str) -> None:
    """The word by which the library's documentation calls it."""
    assert name_of(strategy) == name


@pytest.mark.parametrize(
    ("strategy", "changed", "name"),
    [
        ("native/optimizer", {"train": {"steps": 5, "precision": "bf16-master"}}, "FSDP2, no reshard"),
        ("native/nothing", {"train": {"steps": 6, "local_steps": 2}}, "local SGD"),
        ("deepspeed/optimizer+tensor2", {}, "ZeRO-1 + TP"),
        ("native/parameters+tensor2+pipeline2", {}, "FSDP2 + TP + PP"),
    ],
)
def test_name_follows_from_the_config(strategy: str, changed: dict[str, Any], name: str) -> None:
    """ZeroRedundancyOptimizer has no fp32 masters; ranks that step by themselves are no DDP; axes are named."""
    assert name_of(strategy, 8, **changed) == name
