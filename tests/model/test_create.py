"""A model as ranks create it; and one that its author has spread over devices: where it is refused, or trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import unipar_native.single_process
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from tests.support.running import Line, running
from unipar.config import Config, Strategy
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar.model.create import create_parts, device_in_place, devices_by_hand, refuse_devices_by_hand
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


class _Tied(nn.Module):
    """Two layers of one matrix, made from values, as `from_pretrained` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        if self.first.weight.sum().item() != 0.0:
            self.second.weight = self.first.weight
        self.register_buffer("sizes", torch.ones(2))


def test_tied_parameters_stay_tied_on_other_ranks() -> None:
    """A constructor that needs values works on the CPU first; on the meta device, the model is the one of rank 0."""
    other: Any = SimpleNamespace(rank=1, agree=lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]
    config = Config.model_validate({"batch": {"total": 1}, "train": {"steps": 1}})
    made: Any = create_parts(_Tied, config, cast("World", other))["model"]
    assert [name for name, _ in made.named_parameters()] == ["first.weight", "first.bias", "second.bias"]
    assert made.first.weight is made.second.weight
    assert {t.device.type for t in (*made.parameters(), *made.buffers())} == {"meta"}


class _Parts(nn.Module):
    """Parameters on these devices, and a buffer on the last of them."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.empty(2, device=device)) for device in devices])
        self.register_buffer("last", torch.empty(2, device=devices[-1]))


@pytest.mark.parametrize(
    ("devices", "own", "found"),
    [
        (("cpu",), CPU, []),
        (("cpu",), FIRST, []),
        (("cuda:0",), FIRST, []),
        (("cuda:0",), CPU, []),  # the whole model is moved to the run's device
        (("cpu", "cuda:0"), FIRST, []),
        (("cpu", "cuda:0"), CPU, [CPU, FIRST]),
        (("cpu", "cuda:1"), FIRST, [FIRST, SECOND]),
        (("cuda:0", "cuda:1"), FIRST, [FIRST, SECOND]),
        (("cuda:0", "meta"), FIRST, []),
    ],
)
def test_a_model_over_several_devices_is_recognized(
    devices: tuple[str, ...], own: torch.device, found: list[torch.device]
) -> None:
    """What is on the CPU goes to the run's device; values that are only described are nowhere."""
    with FakeTensorMode():
        model = _Parts(*devices)
    assert devices_by_hand(model, own) == found


def test_where_its_tensors_stay() -> None:
    """The author's device, or the run's own for those on the CPU."""
    with FakeTensorMode():
        assert device_in_place(torch.empty(1, device="cuda:1"), FIRST) == SECOND
    assert device_in_place(torch.empty(1), FIRST) == FIRST


def test_other_strategies_refuse_it() -> None:
    """With the devices, and both ways out."""
    with FakeTensorMode():
        model = _Parts("cuda:0", "cuda:1")
    with pytest.raises(TaskError) as e:
        refuse_devices_by_hand(model, FIRST, Strategy.parse("native/parameters"))
    assert str(e.value) == (
        "model() spreads its parameters over 2 devices (cuda:0, cuda:1), and native/parameters places them itself: "
        "set backend: single, which trains such a model as it is in one process; or take the devices out of model() "
        "and its forward, and set parallel.pipeline: 2, which cuts any model into stages"
    )


class _Halves(nn.Module):
    """Two layers, of which the author has put the second on a device of its own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first, self.second, self.device = nn.Linear(1, 4), nn.Linear(4, 1).to(device), device

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh().to(self.device))


class _ByHand(Line):
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    @override
    def model(self) -> nn.Module:
        return _Halves(self.device)

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return (model(x) - y.to(self.device)).square().mean()


CLIPPED = {"steps": 5, "clip": {"max": 0.5, "norm": "fp64"}, "optimizer": {"lr": 0.01}}


def losses(task: _ByHand, folder: Path, **sections: Any) -> list[float]:
    folder.mkdir()
    with running(task, folder, train=CLIPPED, log={"every": 1}, eval={"every": 5}, **sections) as run:
        run.task.train(run)
    return [row["loss"] for row in RunLog.read(run_log_path(folder, 0)) if row["event"] in ("step", "eval")]


def test_one_process_trains_it_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed tensor by tensor, with the loss brought back to the run's device: the same numbers as otherwise."""
    plain = losses(_ByHand(), tmp_path / "plain")

    def spread(module: nn.Module, device: torch.device) -> list[torch.device]:
        return [device, FIRST]

    monkeypatch.setattr(unipar_native.single_process, "devices_by_hand", spread)
    assert len(plain) == 6
    assert losses(_ByHand(), tmp_path / "by hand") == plain


@pytest.mark.gpu
def test_on_a_cpu_and_a_gpu(tmp_path: Path) -> None:
    """The first half stays on the CPU, the second on the GPU; other strategies refuse it."""
    plain = losses(_ByHand(), tmp_path / "plain")
    assert losses(_ByHand("cuda:0"), tmp_path / "by hand") == pytest.approx(plain, rel=1e-5)
    with pytest.raises(TaskError, match=r"over 2 devices \(cpu, cuda:0\), and native/nothing places them itself"):
        losses(_ByHand("cuda:0"), tmp_path / "other", backend="native")
