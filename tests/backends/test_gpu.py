"""On a CUDA device: alone over NCCL, and two ranks that share one device over gloo. `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override
from unipar_native.data_parallel import MicrobatchRound, RoundDataParallel

import unipar
from tests.conformance.tasks import Grouped, Normed
from unipar.backend import Micro, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.errors import Unsupported

pytestmark = pytest.mark.gpu

STRATEGIES = (
    "native/nothing",
    "native/optimizer",
    "native/gradients",
    "native/parameters",
    "deepspeed/nothing",
    "deepspeed/parameters",
    "accelerate",
)

HOROVOD = pytest.param(
    "horovod",
    marks=pytest.mark.skipif(
        registry.why_not_installed(registry.find_backend("horovod")) is not None, reason="not built here"
    ),
)


def _losses(strategy: str, folder: Path, device: str, ranks: int, precision: str = "fp32", **model: Any) -> list[float]:
    made: dict[str, Any] = {"device": device, "batch": {"total": 16, "micro": 4}, "parallel": {"data": ranks}}
    made |= {
        "train": {"steps": 6, "clip": 0.3, "precision": precision},
        "log": {"every": 1},
        "out": str(folder),
        "model": model,
    }
    config = strategies.config_in_strategy(Config.model_validate(made), Strategy.parse(strategy))
    report = unipar.launch(config, task=Grouped)
    return [loss for _, loss in report.losses]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One process on the CPU."""
    return _losses("single", tmp_path_factory.mktemp("gpu") / "single", "cpu", 1)


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_one_device(strategy: str, alone: list[float], tmp_path: Path) -> None:
    """A world of one over NCCL trains as the CPU does."""
    assert _losses(strategy, tmp_path / "run", "cuda", 1) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("strategy", ["native/nothing", "deepspeed/nothing", "accelerate"])
def test_two_ranks_share_a_device(strategy: str, alone: list[float], tmp_path: Path) -> None:
    """`device: cuda:0` lets ranks meet over gloo, where NCCL would want a device for each."""
    assert _losses(strategy, tmp_path / "run", "cuda:0", 2) == pytest.approx(alone, abs=1e-4)


def test_dataparallel_on_one_device(alone: list[float], tmp_path: Path) -> None:
    """nn.DataParallel has one device: it calls the model."""
    assert _losses("native/nothing+dp", tmp_path / "run", "cuda:0", 1) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("devices", [2, 3])
def test_dataparallel_over_several(
    devices: int, alone: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, four microbatches dealt over its devices; over three the last round has one."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"{devices} GPUs are needed, and {torch.cuda.device_count()} are here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices))))
    assert _losses("native/nothing+dp", tmp_path / "run", "cuda", 1) == pytest.approx(alone, abs=1e-4)


class Scaled(nn.Module):
    """A table that is no buffer, and statistics that are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.table = nn.Linear(4, 3), nn.BatchNorm1d(3), torch.arange(3.0)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) * self.table


def test_dataparallels_copies_share_a_device() -> None:
    """Two copies on one device, a round of two and one of one: gradients are those of the model itself."""
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    model = Scaled().to(device)
    model.table = model.table.to(device)
    call = ForwardCall(model, device)
    batches = [torch.randn(5, 4, device=device) for _ in range(3)]
    micros = [Micro(batch, scale) for batch, scale in zip(batches, (0.5, 0.3, 0.2), strict=True)]

    def loss(model: nn.Module, batch: Tensor, number: int) -> Tensor:
        return (model(batch) - 1).square().mean() + sum(p.square().sum() for p in model.parameters())

    for micro in micros:
        (call(micro.bind(loss), OpaqueBatch(micro.batch)) * micro.scale).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    replicas = RoundDataParallel(call, [0, 0])
    for some in (micros[:2], micros[2:]):
        replicas(loss, OpaqueBatch(MicrobatchRound(some))).backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert grad is not None
        assert torch.allclose(p.grad, grad, atol=1e-5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-master"])
def test_bf16(precision: str, alone: list[float], tmp_path: Path) -> None:
    """FSDP2 in both kinds of bf16."""
    assert _losses("native/parameters", tmp_path / "run", "cuda", 1, precision) == pytest.approx(alone, abs=2e-2)


@pytest.mark.parametrize(
    "strategy",
    ["single", *STRATEGIES, HOROVOD, "accelerate/parameters", "deepspeed/gradients", "accelerate/parameters+zero"],
)
def test_fp16(strategy: str, alone: list[float], tmp_path: Path) -> None:
    """Under autocast, with a loss scale; Horovod may have been built without CUDA."""
    try:
        found = _losses(strategy, tmp_path / "run", "cuda", 1, "fp16")
    except Unsupported as e:
        if strategy != "horovod":
            raise
        pytest.skip(str(e))
    assert found == pytest.approx(alone, abs=2e-2)


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
