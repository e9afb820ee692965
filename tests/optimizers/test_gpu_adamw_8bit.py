"""Moments of 8 bits on a CUDA device: alone, and split over two ranks that share it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.conformance.eight_bits import Wide
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy

pytestmark = pytest.mark.gpu


def _losses(strategy: str, folder: Path, device: str, ranks: int) -> list[float]:
    optimizer = {"name": "adamw-8bit", "block": 16, "lr": 1e-2, "eps": 1e-6}
    made: dict[str, Any] = {"device": device, "batch": {"total": 16, "micro": 4}, "parallel": {"data": ranks}}
    made |= {"train": {"steps": 6, "clip": 0.3, "optimizer": optimizer}, "log": {"every": 1}, "out": str(folder)}
    report = unipar.launch(
        strategies.config_in_strategy(Config.model_validate(made), Strategy.parse(strategy)), task=Wide
    )
    return [loss for _, loss in report.losses]


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed here")
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("native/optimizer", 2), ("native/parameters", 2)])
def test_losses_are_those_of_the_cpu(strategy: str, ranks: int, tmp_path: Path) -> None:
    """A code may turn into its neighbour; four digits stay."""
    on_cpu = _losses("single", tmp_path / "cpu", "cpu", 1)
    assert _losses(strategy, tmp_path / "gpu", "cuda:0", ranks) == pytest.approx(on_cpu, rel=1e-4)
