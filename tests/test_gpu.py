"""On a CUDA device: alone over NCCL, and two ranks that share one device over gloo. `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.conformance.tasks import Grouped, Normed
from unipar import registry
from unipar.config import Cell, Config

pytestmark = pytest.mark.gpu

CELLS = (
    "native/nothing",
    "native/optimizer",
    "native/gradients",
    "native/parameters",
    "deepspeed/nothing",
    "deepspeed/parameters",
    "accelerate",
)

HOROVOD = pytest.param(
    "horovod", marks=pytest.mark.skipif(registry.missing(registry.find("horovod")) is not None, reason="not built here")
)


def _losses(cell: str, folder: Path, device: str, ranks: int, precision: str = "fp32", **model: Any) -> list[float]:
    made: dict[str, Any] = {"device": device, "batch": {"total": 16, "micro": 4}, "parallel": {"data": ranks}}
    made |= {
        "train": {"steps": 6, "clip": 0.3, "precision": precision},
        "log": {"every": 1},
        "out": str(folder),
        "model": model,
    }
    config = registry.at(Config.model_validate(made), Cell.parse(cell))
    report = unipar.launch(config, task=Grouped)
    return [loss for _, loss in report.losses]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One process on the CPU."""
    return _losses("single", tmp_path_factory.mktemp("gpu") / "single", "cpu", 1)


@pytest.mark.parametrize("cell", ["single", *CELLS])
def test_one_device(cell: str, alone: list[float], tmp_path: Path) -> None:
    """A world of one over NCCL trains as the CPU does."""
    assert _losses(cell, tmp_path / "run", "cuda", 1) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("cell", ["native/nothing", "deepspeed/nothing", "accelerate"])
def test_two_ranks_share_a_device(cell: str, alone: list[float], tmp_path: Path) -> None:
    """`device: cuda:0` lets ranks meet over gloo, where NCCL would want a device for each."""
    assert _losses(cell, tmp_path / "run", "cuda:0", 2) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-master"])
def test_bf16(precision: str, alone: list[float], tmp_path: Path) -> None:
    """FSDP2 in both kinds of bf16."""
    assert _losses("native/parameters", tmp_path / "run", "cuda", 1, precision) == pytest.approx(alone, abs=2e-2)


@pytest.mark.parametrize(
    "cell", ["single", *CELLS, HOROVOD, "accelerate/parameters", "deepspeed/gradients", "accelerate/parameters+zero"]
)
def test_fp16(cell: str, alone: list[float], tmp_path: Path) -> None:
    """Under autocast, with a loss scale."""
    assert _losses(cell, tmp_path / "run", "cuda", 1, "fp16") == pytest.approx(alone, abs=2e-2)


def test_parameters_in_the_hosts_memory(alone: list[float], tmp_path: Path) -> None:
    """FSDP2's CPU offload; the norm is summed there as well."""
    found = _losses("native/parameters", tmp_path / "run", "cuda", 1, offload="parameters")
    assert found == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("how", ["blocks", "selective"])
def test_recomputed(how: str, alone: list[float], tmp_path: Path) -> None:
    """On the device as on the CPU."""
    assert _losses("native/parameters", tmp_path / "run", "cuda", 1, recompute=how) == pytest.approx(alone, abs=1e-4)


def test_sync_batchnorm(tmp_path: Path) -> None:
    """In a world of one it is BatchNorm."""
    made: dict[str, Any] = {"device": "cuda", "batch": {"total": 16, "micro": 8}, "train": {"steps": 4}}
    made |= {"log": {"every": 1}, "parallel": {"data": 1}}
    plain, synced = (
        unipar.launch(
            Config.model_validate(made | {"model": {"sync_batchnorm": wanted}, "out": str(tmp_path / str(wanted))}),
            task=Normed,
        )
        for wanted in (False, True)
    )
    assert [loss for _, loss in synced.losses] == pytest.approx([loss for _, loss in plain.losses], abs=1e-4)
