"""Recomputing, compiling and local steps in one process: their effects, and configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import unipar
from tests.conformance import tasks
from tests.support.running import Line, running
from unipar.backend import checks
from unipar.config import config_source as source
from unipar.engines.loss_scale import LossScaler
from unipar.errors import ConfigError, NonFinite, TaskError, Unsupported
from unipar.model.transforms import apply_transforms
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of its own calls


class Counting(nn.Module):
    """Block with a BatchNorm and dropout that counts its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(torch.relu(self.norm(self.up(x))))


class Blocky(unipar.Task):
    """Task whose model has two such blocks."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(Counting(), Counting(), nn.Linear(4, 1))

    @override
    def data(self) -> Any:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(16, 4, generator=g)
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()


def _state(folder: Path, name: str, **model: Any) -> tuple[dict[str, Tensor], int]:
    """Return the state after three steps, running statistics included, and the number of forward calls of a block."""
    (folder / name).mkdir()
    with running(Blocky(), folder / name, model=model) as run:
        run.task.train(run)
        module: Any = run.parts["model"].module
        state = {f"{p.name}/{p.kind}": p.tensor.detach().clone() for p in run.engine.pieces()}
        return state, module[0].calls


@pytest.mark.parametrize("how", ["blocks", "selective"])
def test_recomputing_changes_no_bit(how: str, tmp_path: Path) -> None:
    """Blocks run twice with the same dropout, and running statistics count each batch once."""
    plain, once = _state(tmp_path, "plain")
    again, twice = _state(tmp_path, how, recompute=how)
    assert (once, twice) == (6, 12)
    assert plain.keys() == again.keys()
    assert [n for n, t in plain.items() if not torch.equal(t, again[n])] == []
    assert plain["0.norm.num_batches_tracked/buffer"] == 6


@pytest.mark.parametrize(("how", "products"), [("none", 0), ("blocks", 2), ("selective", 0)])
def test_selective_keeps_matrix_products(how: str, products: int, tmp_path: Path) -> None:
    """The backward repeats a block's matrix products for `blocks` and keeps them for `selective`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.addmm.default  # the forward's: the backward has mm alone
            return func(*args, **(kwargs or {}))

    with running(Blocky(), tmp_path, model={"recompute": how}, batch={"total": 4}) as run:
        local_batch = next(run.batches())
        module: Any = run.parts["model"].module
        loss = run.task.loss(module, local_batch[0])
        with Products() as seen:
            loss.backward()
        module.zero_grad()
        run.step(local_batch)
    assert seen.count == products


class NoBlocks(Line):
    pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"recompute": "blocks"},
         "model.recompute: blocks recomputes block by block, and the model has no blocks: name them in model.blocks or "
         "in the task's blocks(), or leave recompute out"),
        ({"compile": "blocks"},
         "model.compile: blocks compiles block by block, and the model has no blocks: name them in model.blocks or in "
         "the task's blocks(), or set model.compile: model"),
    ],
)  # fmt: skip
def test_a_model_without_blocks(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Recomputing and compiling by block are refused if the model has no blocks."""
    with pytest.raises(ConfigError) as e, running(NoBlocks(), tmp_path, model=model):
        pass
    assert str(e.value) == message


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    """The error for an unknown compiler lists those that torch knows."""
    wanted = r"^model.compile.backend: there is no 'induktor'; torch knows .*inductor"
    compiled = {"compile": {"backend": "induktor"}}
    with pytest.raises(ConfigError, match=wanted), running(Line(), tmp_path, model=compiled):
        pass


def test_compiled_means_compiled(tmp_path: Path) -> None:
    """The loss runs through compiled code: of the blocks, or of the whole model if it has none."""
    graphs: list[Any] = []

    def seen(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.registry import register_backend

    register_backend(seen, name="unipar_seen")
    for task in (Line(), tasks.Regression()):
        graphs.clear()
        torch.compiler.reset()
        with running(task, tmp_path, model={"compile": {"backend": "unipar_seen"}}) as run:
            run.step(next(run.batches()))
        assert graphs
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"offload": "parameters"}, "parallel": {"shard": "parameters"}},
         "native/parameters: model.offload: parameters needs CUDA: on the CPU everything is in host memory; leave it "
         "out"),
        ({"model": {"sync_batchnorm": True}},
         "native/nothing: model.sync_batchnorm: true needs CUDA: torch's SyncBatchNorm accepts no CPU tensors; "
         "leave it out"),
        ({"train": {"steps": 1, "precision": "fp16"}},
         "native/nothing: train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"),
        ({"train": {"steps": 1, "local_steps": 2}, "parallel": {"shard": "gradients"}},
         "native/gradients: train.local_steps: 2 is not available here, only in native/nothing"),
    ],
)  # fmt: skip
def test_refused_on_the_cpu(sections: dict[str, Any], message: str) -> None:
    """Settings that need CUDA or another shard are refused before any process starts."""
    from unipar.config import Config

    made = {"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}, **sections}
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(Config.model_validate(made))
    assert str(e.value) == message


def test_the_optimizer_alone_cannot_be_offloaded() -> None:
    """Offloading only the optimizer is refused, because FSDP2 moves everything together."""
    from unipar.config import Config

    made: dict[str, Any] = {"device": "cuda", "batch": {"total": 4}, "train": {"steps": 1}}
    made |= {"parallel": {"shard": "parameters"}, "model": {"offload": "optimizer"}}
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(Config.model_validate(made))
    assert str(e.value) == (
        "native/parameters: model.offload: optimizer is not available: FSDP2 moves parameters, gradients and the "
        "optimizer's states together; say model.offload: parameters"
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"steps": 6, "local_steps": 2}, "eval": {"every": 3}},
         "eval.every (3) is not a multiple of train.local_steps (2): between two synchronizations each rank "
         "has a different model"),
        ({"train": {"steps": 6, "local_steps": 2, "precision": "fp16"}},
         "train: local_steps (2) and fp16 exclude each other: loss scaling would make each rank skip "
         "different steps; use bf16-mixed"),
    ],
)  # fmt: skip
def test_what_local_steps_exclude(sections: dict[str, Any], message: str) -> None:
    """Settings that contradict train.local_steps are refused with both values, before any process starts."""
    with pytest.raises(ConfigError) as e:
        source.load_given_config({"batch": {"total": 4}, **sections})
    assert str(e.value) == f"the config: {message}"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.BatchNorm1d(2),
         "model.sync_batchnorm: true replaces every BatchNorm in the model, and the model is one: put it into a "
         "torch.nn.Sequential"),
        (nn.Sequential(nn.Linear(2, 2)),
         "model.sync_batchnorm: true, and the model has no BatchNorm: leave it out"),
    ],
)  # fmt: skip
def test_nothing_to_put_syncbatchnorm_in_place_of(model: nn.Module, message: str) -> None:
    """sync_batchnorm is refused if the model is a BatchNorm itself, or has none."""
    told = {"device": "cuda", "batch": {"total": 4}, "train": {"steps": 1}, "model": {"sync_batchnorm": True}}
    with pytest.raises(ConfigError) as e:
        apply_transforms(model, (), source.load_given_config(told).config)
    assert str(e.value) == message


def test_an_evaluation_between_two_means(tmp_path: Path) -> None:
    """Evaluation is refused between two averages, when each rank has a different model."""
    with running(Line(), tmp_path, backend="native", train={"steps": 4, "local_steps": 2}) as run:
        local_batches = run.batches()
        run.step(next(local_batches))
        with pytest.raises(TaskError) as e:
            run.evaluate()
        assert str(e.value) == (
            "evaluate() was called after step 1: with train.local_steps: 2 ranks have the same model only after every "
            "2 steps and after the last one; evaluate then"
        )
        run.step(next(local_batches))
        assert run.evaluate()["loss"] > 0
        for local_batch in local_batches:
            run.step(local_batch)


# fp16's loss scale: the arithmetic on the CPU, where `check` would refuse it


def _nothing(config: object) -> tuple[str, ...]:
    return ()


class Overflowing(Line):
    """Task whose third step has a gradient that no fp16 scale can represent."""

    def __init__(self, bad: float) -> None:
        self.bad, self.count = bad, 0

    @override
    def loss(self, model: Any, batch: Any) -> Any:
        self.count += 1
        loss = super().loss(model, batch) * 1e-4  # what overflows is what is meant to
        if self.count == 3:
            p = model.weight
            return loss + (p - p.detach()).sum() * self.bad
        return loss


def test_a_step_is_left_out_and_the_schedule_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scale is halved, the weights stay, and the warm-up does not advance."""
    monkeypatch.setattr(checks, "_refuse_on_cpu", _nothing)
    train = {"steps": 5, "optimizer": {"name": "sgd", "lr": 1e-3}, "precision": "fp16", "schedule": {"warmup": 4}}
    with running(Overflowing(1e35), tmp_path, train=train, batch={"total": 4}, log={"every": 1}) as run:
        module: Any = run.parts["model"].module
        engine: Any = run.engine
        weights: list[float] = []
        for local_batch in run.batches():
            run.step(local_batch)
            weights.append(module.weight.item())
        assert float(engine.scaler.scale) == 2.0**15
    assert weights[1] == weights[2]
    assert len(set(weights)) == 4
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [r["step"] for r in rows if r["event"] == "skipped"] == [3]
    rates = [r["lr"] for r in rows if r["event"] == "step"]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 0.75e-3, 1e-3])


def test_the_scale_moves_as_torchs_does() -> None:
    """The scale equals that of torch's GradScaler over steps of which some overflow."""
    torchs: Any = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScaler(torch.device("cpu"), patience=3)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.0)
    for good in (1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1):
        weight.grad = torch.full((2,), 1.0 if good else float("inf"))
        torchs.scale(torch.ones(()))
        torchs.unscale_(optimizer)
        torchs.step(optimizer)
        torchs.update()
        assert ours.overflow(torch.tensor(1.0 if good else float("nan"))).item() is not bool(good)
        assert ours.counters()["loss_scale"] == torchs.get_scale()


def test_gradients_that_no_scale_saves() -> None:
    """Gradients that stay infinite at every scale raise an error where the host looks, and no later step is finite."""
    scaler = LossScaler(torch.device("cpu"))
    bad = torch.tensor(float("inf"))
    assert all(scaler.overflow(bad) for _ in range(26))
    assert scaler.counters() == {"loss_scale": 2.0**-10, "finite_steps": 0}
    assert scaler.overflow(bad)
    with pytest.raises(NonFinite) as e:
        scaler.check()
    scaler.unscale([gradient := torch.ones(2) * scaler.scale])
    assert gradient.isnan().all()
    assert str(e.value) == (
        "gradients are not finite at any loss scale down to 0.000976562: look at the loss, the rate "
        "(train.optimizer.lr) and the clip (train.clip), or use bf16-mixed"
    )
