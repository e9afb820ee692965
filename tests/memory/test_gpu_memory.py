"""Memory on a CUDA device, alone over NCCL. `pytest -m gpu`; written without a GPU, and not run on one yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.memory.account import MEMORY_PHASES, MemoryAccount

pytestmark = pytest.mark.gpu

PLANTED = 5_000_000
WEIGHTS = 4 * 512 * 512 * 4
NORM = 2 * 512 * 4
STRATEGIES = ("native/nothing", "native/optimizer", "native/gradients", "native/parameters")
KEPT: list[Tensor] = []


class Tied(unipar.Task):
    """A little more than a million parameters, of which a quarter is used twice."""

    @override
    def model(self) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5)), nn.LayerNorm(512))
        first, last = model[0], model[4]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        last.weight = first.weight
        return model

    @override
    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


class Keeping(Tied):
    """A loss keeps five megabytes for good, and nobody knows."""

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not KEPT:
            KEPT.append(torch.ones(PLANTED // 4, device=batch[0].device))
        return super().loss(model, batch)


def accounts(folder: Path, *strategies: str, task: type[unipar.Task] = Tied, **more: Any) -> dict[str, MemoryAccount]:
    """Of rank 0, by strategy."""
    made: dict[str, Any] = {
        "device": "cuda",
        "parallel": {"data": 1},
        "batch": {"total": 8},
        "model": {"blocks": "none"},
        "train": {"steps": 10, "optimizer": {"lr": 1e-3}},
        "out": str(folder / "out"),
    }
    found = unipar.compare(made | more, task=task, strategies=strategies)
    assert found.unwatched == "" or found.unwatched.startswith("the host's memory was not recorded: ")
    assert [row.outcome for row in found.rows] == ["ran"] * (1 + len(strategies)), [row.note for row in found.rows]
    return {row.strategy: row.memory[0] for row in found.rows}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MemoryAccount]:
    return accounts(tmp_path_factory.mktemp("memory"), *STRATEGIES)


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_parts_add_up_to_the_allocators_peak_in_every_phase(strategy: str, found: dict[str, MemoryAccount]) -> None:
    """And but for a fiftieth every byte has a name; history and counters agree, else a note would say so."""
    account = found[strategy]
    assert account.device == "cuda"
    assert [phase.name for phase in account.phases] == list(MEMORY_PHASES)
    assert not [note for note in account.notes if "differ" in note or "torch kept" in note]
    for phase in account.phases:
        assert sum(phase.held.values()) == phase.peak > 0
        assert abs(phase.unattributed) <= 0.02, (phase.name, phase.held)
        assert phase.reserved is not None
        assert phase.active is not None
        assert phase.requested is not None
        assert phase.requested <= phase.active <= phase.reserved
        assert account.base + phase.peak <= phase.active


@pytest.mark.parametrize("strategy", ["single", "native/nothing"])
def test_known_tensors_are_exact(strategy: str, found: dict[str, MemoryAccount]) -> None:
    """A tied weight counts once; two moments for each parameter."""
    told = next(phase.held for phase in found[strategy].phases if phase.name == "update")
    assert told["parameters"] == WEIGHTS + NORM
    assert told["optimizer"] - 2 * (WEIGHTS + NORM) in range(1024)  # and the count of steps


def test_what_two_ranks_send_is_communication(tmp_path: Path) -> None:
    """On one device over gloo: every byte has a name on it, and split parameters are halved."""
    found = accounts(tmp_path, "native/nothing", "native/parameters", device="cuda:0", parallel={"data": 2})
    for account in found.values():
        for phase in account.phases:
            assert sum(phase.held.values()) == phase.peak > 0
            assert abs(phase.unattributed) <= 0.02, (phase.name, phase.held)
    steady = {strategy: {p.name: p for p in account.phases}["steady"] for strategy, account in found.items()}
    whole, split = (steady[strategy].held["optimizer"] for strategy in ("native/nothing", "native/parameters"))
    assert split == pytest.approx(whole / 2, rel=0.01)


def test_a_hidden_buffer_is_unattributed(tmp_path: Path) -> None:
    """Five megabytes that a loss keeps for good, in every phase from then on."""
    account = accounts(tmp_path, "native/nothing", task=Keeping)["native/nothing"]
    for phase in account.phases[1:]:
        assert PLANTED <= phase.held["unattributed"] < 1.1 * PLANTED, phase.name


def test_the_driver_counts_the_whole_process(found: dict[str, MemoryAccount]) -> None:
    """More than the allocator has, by a context at least; or a note says why it is not known."""
    device = found["native/nothing"].on
    assert device is not None
    assert device.name == torch.cuda.get_device_name(0)
    if device.used is None:
        assert any(note.startswith("memory of CUDA and NCCL was not measured: ") for note in found["single"].notes)
        pytest.skip("NVML does not tell here")
    assert device.outside_allocator is not None
    assert device.outside_allocator > 50 * 2**20


def test_what_is_offloaded_is_the_hosts(tmp_path: Path) -> None:
    """Parameters and the optimizer's states are in its account, or among its pinned pages; the device has less."""
    here, away = (
        accounts(tmp_path / how, "native/parameters", model={"blocks": "none", "offload": how})["native/parameters"]
        for how in ("none", "parameters")
    )
    steady = {phase.name: phase for phase in away.phases}["steady"]
    assert steady.peak < {phase.name: phase for phase in here.phases}["steady"].peak
    assert steady.held.get("optimizer", 0) < 1024
    if away.host is None:
        pytest.skip("there is no compiler, so the host's memory was not recorded")
    kept = [*away.host.phases, *away.pinned]
    assert max(phase.held.get("optimizer", 0) for phase in kept) >= 2 * (WEIGHTS + NORM)
    for phase in kept:
        assert sum(phase.held.values()) == phase.peak
