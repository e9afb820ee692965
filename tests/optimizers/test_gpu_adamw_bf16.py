"""Moments in bf16 on a CUDA device: the roundings of the CPU, alone, and split over two ranks that share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from tests.conformance.tasks import Grouped
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.optimizers.stochastic_rounding import ElementRuns, draw_bits, round_by_chance

pytestmark = pytest.mark.gpu


def _losses(strategy: str, folder: Path, device: str, ranks: int) -> list[float]:
    optimizer = {"name": "adamw-bf16", "lr": 1e-2, "eps": 1e-6}
    made: dict[str, Any] = {"device": device, "batch": {"total": 16, "micro": 4}, "parallel": {"data": ranks}}
    made |= {"train": {"steps": 6, "clip": 0.3, "optimizer": optimizer}, "log": {"every": 1}, "out": str(folder)}
    report = unipar.launch(
        strategies.config_in_strategy(Config.model_validate(made), Strategy.parse(strategy)), task=Grouped
    )
    return [loss for _, loss in report.losses]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("native/optimizer", 2), ("native/parameters", 2)])
def test_moments_in_bf16_are_those_of_the_cpu(strategy: str, ranks: int, tmp_path: Path) -> None:
    """A moment may become its neighbour; four digits stay."""
    on_cpu = _losses("single", tmp_path / "cpu", "cpu", 1)
    assert _losses(strategy, tmp_path / "gpu", "cuda:0", ranks) == pytest.approx(on_cpu, rel=1e-4)


def test_bits_are_those_of_the_cpu() -> None:
    """Bit for bit, of elements in runs too, and what is rounded by them; a step count may be on either device."""
    numbers = torch.randn(6, generator=torch.Generator().manual_seed(0))
    found: list[list[float]] = []
    for device, counts in (("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "cuda")):
        places = ElementRuns(8, 3, 6, 2).numbers(0, 6, torch.device(device))
        bits = draw_bits(places, torch.tensor(3.0, device=counts), "0 w")
        found.append([*bits.tolist(), *round_by_chance(numbers.to(device, copy=True), bits & 0xFFFF).tolist()])
    assert found[0] == found[1] == found[2]


def test_only_ones_are_no_zero() -> None:
    """CUDA's NaN has only ones in its mantissa."""
    zero = torch.zeros(4, device="cuda")
    rounded = round_by_chance(zero / zero, torch.full((4,), 65535, dtype=torch.int32, device="cuda"))
    assert rounded.isnan().all()
