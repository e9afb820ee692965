"""What an engine refuses, in the words that a user reads; and what only some engines have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

import unipar
from tests.conformance import tasks
from tests.support.running import running
from unipar.backend import Engine
from unipar.backend.engine import DelegatingEngine
from unipar.distributed import world
from unipar.engines.gradients import clip_alike
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries' own, of their own calls


def _refused(task: unipar.Task, folder: Path, **sections: Any) -> str:
    with pytest.raises(TaskError) as e, running(task, folder, **sections) as run:
        task.train(run)
    return str(e.value)


@pytest.mark.parametrize("backend", ["native", "accelerate"])
def test_a_parameter_unused_later(backend: str, tmp_path: Path) -> None:
    """The first step used it; DDP would reduce half of the gradients and say so a step later, by number."""
    assert _refused(tasks.AtTimes(), tmp_path, backend=backend, batch={"total": 4}) == (
        "the loss does not use the parameter 'extra.weight' in this step, though it used all in the first: "
        f"set options.{backend}.find_unused_parameters: true, or use it times 0.0"
    )


def test_a_blocks_parameter_read_outside(tmp_path: Path) -> None:
    """Where parameters are split it is there in the block's forward alone."""
    split = {"backend": "native", "parallel": {"shard": "parameters"}}
    assert _refused(tasks.BlockReading(), tmp_path, **split) == (
        "the loss reads a parameter of a block outside that block's forward, where it is sharded: "
        "read it in the block's own forward, or set model.blocks: none"
    )


def test_and_the_way_out_of_it_works(tmp_path: Path) -> None:
    """`model.blocks: none` splits the model as one."""
    with running(tasks.BlockReading(), tmp_path, backend="native", parallel={"shard": "parameters"},
                 model={"blocks": "none"}) as run:  # fmt: skip
        run.task.train(run)
        assert run.done == 3


@pytest.mark.parametrize("strategy", ["native/parameters", "deepspeed/nothing", "deepspeed/parameters"])
def test_a_parameter_without_dimensions(strategy: str, tmp_path: Path) -> None:
    """Two libraries would die in their own words."""
    backend, shard = strategy.split("/")
    assert _refused(tasks.Scalar(), tmp_path, backend=backend, parallel={"shard": shard}) == (
        f"{strategy} cannot hold the parameter 'scale', which has no dimensions: give it the shape (1,)"
    )


class _Shared(tasks.Plain):
    """Two blocks with one matrix."""

    @override
    def model(self) -> nn.Module:
        model = tasks.Tiny()
        first, second = model.blocks
        assert isinstance(first, tasks.Block)
        assert isinstance(second, tasks.Block)
        second.up.weight = first.up.weight
        return model


@pytest.mark.parametrize("backend", ["native", "accelerate"])
def test_blocks_that_share_a_parameter(backend: str, tmp_path: Path) -> None:
    """Each would be split by itself, and the library ends in its own words; as one they train."""
    split = {"backend": backend, "parallel": {"shard": "parameters"}}
    assert _refused(_Shared(), tmp_path, **split) == (
        f"{backend}/parameters splits each block by itself, and 'blocks.1' shares its 'up.weight' with 'blocks.0': "
        "set model.blocks: none, or name blocks that share nothing"
    )
    with running(_Shared(), tmp_path, **split, model={"blocks": "none"}) as run:
        run.task.train(run)
        assert run.done == 3


@pytest.mark.parametrize("shard", ["nothing", pytest.param("optimizer", marks=pytest.mark.sweep)])
def test_the_first_step_settles_the_search(shard: str, tmp_path: Path) -> None:
    """DDP searches for unused parameters if the first step had some, and not otherwise."""
    from unipar_native.ddp import DDPEngine

    for task, wanted in ((tasks.Plain(), False), (tasks.Unused(), True)):
        with running(task, tmp_path, backend="native", parallel={"shard": shard}) as run:
            engine = run.engine
            assert isinstance(engine, DDPEngine)
            assert engine.find_unused_parameters is None
            run.task.train(run)
            assert engine.find_unused_parameters is wanted
            assert isinstance(engine.wrapped, nn.parallel.DistributedDataParallel)


def test_zero_leaves_linear_alone(tmp_path: Path) -> None:
    """ZeRO-3 would replace torch.nn.functional.linear for the whole process, for good."""
    before = torch.nn.functional.linear
    with running(tasks.Plain(), tmp_path, backend="deepspeed", parallel={"shard": "parameters"}) as run:
        run.task.train(run)
    assert torch.nn.functional.linear is before


@pytest.mark.parametrize(
    ("parameters", "bucket"), [(1_000, 65_536), (9_000_016, 562_500), (70_000_000_000, 500_000_000), (None, None)]
)
def test_scaled_buckets(parameters: int | None, bucket: int | None) -> None:
    """A sixteenth of the model, an even number from 65,536 to 5e8; the rule in words while the model is unknown."""
    from unipar_deepspeed import backend

    from unipar.config import Config

    config = Config.model_validate(
        {"batch": {"total": 1}, "train": {"steps": 1}, "backend": "deepspeed", "parallel": {"shard": "parameters"}}
    )
    told = backend.native_config(config, parameters)["zero_optimization"]
    rule = "parameters // 32 * 2, from 65,536 to 5e8"
    assert told["reduce_bucket_size"] == told["stage3_prefetch_bucket_size"] == (bucket or rule)
    assert told["stage3_max_live_parameters"] == (2 * bucket if bucket else f"{rule}, times 2")
    assert told["stage3_param_persistence_threshold"] == 4_096


def test_the_model_is_built_for_real_where_meta_will_not_do(tmp_path: Path) -> None:
    """A constructor that looks at values runs for real on every rank, and is emptied where it is not rank 0."""
    from unipar.model.create import _create_on_meta  # pyright: ignore[reportPrivateUsage]

    class Looking(tasks.Plain):
        @override
        def model(self) -> nn.Module:
            depth = int(torch.linspace(1, 2, 2)[-1].item())
            return nn.Sequential(*[nn.Linear(2, 2) for _ in range(depth)])

    made = _create_on_meta(Looking().model)
    assert [(n, p.device.type) for n, p in made.named_parameters()][:1] == [("0.weight", "meta")]
    assert len(made) == 2


def test_a_group_that_was_left_is_not_the_reducers_to_free(tmp_path: Path) -> None:
    """DDP's reducer frees its group with the GIL held, and hangs if that group's thread wants the GIL just then."""
    with running(tasks.Plain(), tmp_path, backend="native") as run:
        run.task.train(run)
        group = torch.distributed.group.WORLD
    assert not torch.distributed.is_initialized()
    assert world._left_groups[-1] is group  # pyright: ignore[reportPrivateUsage]


def test_an_engine_around_another_leaves_nothing_out() -> None:
    """Each of an engine's methods reaches the one within; a neutral hook that stays behind would be silent."""
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert "take_mean" in methods
    assert methods <= set(vars(DelegatingEngine))


class OwnClear(torch.optim.SGD):
    """Optimizer that counts how often gradients are cleared."""

    cleared = 0

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


class ClearingItself(tasks.Owning):
    """Task whose optimizer clears gradients in its own way."""

    @override
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return OwnClear(groups, lr=0.1)


def test_an_optimizer_that_clears_gradients_itself(tmp_path: Path) -> None:
    """Its `zero_grad()` is called once a step."""
    with running(ClearingItself(), tmp_path, backend="single", train={"steps": 3}) as run:
        run.task.train(run)
        assert isinstance(engine := run.engine, WrapperEngine)
        assert isinstance(optimizer := engine.base, OwnClear)
        assert optimizer.cleared == run.done == 3


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_alike_gradients(limit: float) -> None:
    """Norm and gradients are PyTorch's own to the bit."""
    parameters = [nn.Parameter(torch.zeros(3, k)) for k in range(1, 6)]
    for k, p in enumerate(parameters):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
    grads = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = clip_grad_norm_(parameters, limit)
    assert torch.equal(clip_alike(grads, limit), norm)
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, parameters, strict=True) if p.grad is not None)
    assert norm.item() == pytest.approx(6.0, abs=2.0)
