"""Out of memory, for real: under each backend and in each phase; and the arithmetic of what fits."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from tests.support.forks import Forks
from tests.support.world import short_folder
from unipar.config import Config
from unipar.errors import OutOfMemory, WorkerFailed
from unipar.planning.estimate import ModelSize, estimate_kept_bytes, suggest_what_fits
from unipar.training.out_of_memory import describe_largest_holders, is_out_of_memory, requested_bytes

MIB = 2**20
TASK = '''
import resource

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar

ABSURD = 2**45


class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.empty(ABSURD).sum()


class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        torch.empty(ABSURD)


class Greedy(unipar.Task):
    """One rank asks for more than there is, in its second step: 16 MiB a sample under a limit of 40, or too much."""

    def __init__(self, way):
        self.way, self.calls = way, 0

    def model(self):
        if self.way == "built":
            return nn.Linear(ABSURD, 1)
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1))

    def data(self):
        return TensorDataset(torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))

    def optimizer(self, groups):
        return (Sgd if self.way == "update" else torch.optim.AdamW)(groups, lr=0.01)

    def loss(self, model, batch):
        self.calls += 1
        y = model(batch[0]).square()
        if self.calls == 2 and torch.distributed.get_rank() == 1:
            if self.way == "limit":
                pages = int(open("/proc/self/statm").read().split()[0])
                resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 40 * 2**20, -1))
                y = y + torch.zeros(len(y), 4 * 2**20).sum(1, keepdim=True)
            if self.way == "python":
                raise MemoryError
            if self.way == "backward":
                y = Asks.apply(y)
        return y.mean()
'''


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None]:
    with short_folder(monkeypatch):
        yield


def told(folder: Path, way: str, **more: Any) -> dict[str, Any]:
    (folder / "greedy.py").write_text(TASK, encoding="utf-8")
    return {
        "task": {"use": f"{folder}/greedy.py:Greedy", "args": {"way": way}},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 4},
        "out": str(folder / "out"),
        **more,
    }


def sentence(folder: Path, way: str, **more: Any) -> str:
    with pytest.raises(OutOfMemory) as e:
        unipar.launch(told(folder, way, **more), quiet=True)
    assert isinstance(e.value.__cause__, WorkerFailed)
    assert "Traceback" in e.value.__cause__.traceback
    return str(e.value)


SIZES = re.compile(r"\d+(\.\d+)? (B|KiB|MiB|GiB)")


def test_a_real_limit_in_the_forward(tmp_path: Path) -> None:
    """Half of the microbatch would have fitted, and so is said, with what held the most."""
    said = sentence(tmp_path, "limit")
    assert said.startswith("rank 1 ran out of memory in the forward of step 2: 64 MiB more were requested, about ")
    (left,) = re.findall(r"about (\d+) MiB were available", said)
    assert 20 <= int(left) <= 40
    assert re.search(r"; the largest part was [a-z ]+, (about )?[\d.]+ MiB \(", said)
    assert re.search(r"\boptimizer,? 2\.0 MiB", said)  # first where nothing held more
    assert said.endswith("; by an estimate batch.micro: 2 instead of 4 would have fitted")


@pytest.mark.parametrize(
    ("way", "strategy", "where"),
    [
        ("backward", "deepspeed/parameters", "in the backward of step 2"),
        ("python", "horovod/nothing", "in the forward of step 2"),
        ("built", "accelerate/nothing", "during set-up"),
        ("update", "native/nothing", "in the update of step 1"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_too_much_is_asked_for(tmp_path: Path, way: str, strategy: str, where: str) -> None:
    """Under each backend, in another phase of each: by torch, or as Python says it."""
    backend, _, shard = strategy.partition("/")
    said = sentence(tmp_path, way, backend=backend, parallel={"data": 2, "shard": shard})
    rank, _, rest = said.partition(" ran out of memory ")
    assert rank in ("rank 0", "rank 1")
    assert rest.startswith(where)
    neither = {
        "backward": "; by an estimate neither a smaller batch.micro nor a strategy that splits more would have fitted",
        "update": "; by an estimate no strategy that splits more would have fitted",
    }
    wanted = {
        "backward": ": 131072 GiB more were requested, about SIZE were available; the largest part was ",
        "update": ": 131072 GiB more were requested, about SIZE were available; the largest part was ",
        "built": (
            ": 131072 GiB more were requested, about SIZE were available; "
            "no other strategy or batch size needs less: the whole model is built before it is split"
        ),
        "python": "; the largest part was ",
    }[way]
    assert SIZES.sub("SIZE", rest.removeprefix(where)).startswith(SIZES.sub("SIZE", wanted))
    if way in ("backward", "update"):
        assert rest.endswith(neither[way])
    if way == "python":
        assert "; by an estimate batch.micro: 2 instead of 4 or " in rest
        assert rest.endswith(" needs less")


def test_under_a_foreign_launcher(tmp_path: Path, forks: Forks) -> None:
    """Whoever starts the ranks: the command's last words are the sentence."""
    (tmp_path / "x.yaml").write_text(json.dumps(told(tmp_path, "limit")), encoding="utf-8")
    first, second = forks.ranks(["-m", "unipar", "run", "x.yaml"], tmp_path)
    assert 0 not in (first.returncode, second.returncode)
    said = "unipar: rank 1 ran out of memory in the forward of step 2: 64 MiB more were requested, "
    assert said in first.stderr + second.stderr


# Arithmetic


def test_what_says_that_memory_ran_out() -> None:
    """By its kind, its words or what it came from; and not what is only named like it."""
    cpu = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "140737488355328 bytes. Error code 12 (Cannot allocate memory)"
    )
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ...")
    wrapped = ValueError("the library failed")
    wrapped.__cause__ = cpu
    assert [is_out_of_memory(e) for e in (cpu, cuda, RuntimeError("std::bad_alloc"), wrapped)] == [True] * 4
    assert [is_out_of_memory(e) for e in (MemoryError(), OSError(errno.ENOMEM, "x"))] == [True] * 2
    assert [is_out_of_memory(e) for e in (RuntimeError("shape"), OSError(errno.ENOENT, "x"), OutOfMemory("said"))] == [
        False
    ] * 3
    assert [requested_bytes(e) for e in (cpu, cuda, MemoryError())] == [2**47, 20 * MIB, None]


def test_what_held_the_most_comes_first() -> None:
    """What has no name is told as about; nothing is said of nothing."""
    parts = {"parameters": 2 * MIB, "optimizer": 4 * MIB, "buffers": 0}
    assert describe_largest_holders(parts, None) == "the largest part was optimizer, 4.0 MiB (parameters 2.0 MiB)"
    assert (
        describe_largest_holders({}, 7 * MIB) == "the largest part was activations and everything else, about 7.0 MiB"
    )
    assert describe_largest_holders({}, None) == ""


def given(**more: Any) -> Config:
    base: dict[str, Any] = {"device": "cpu", "parallel": {"data": 2}, "batch": {"total": 24}, "train": {"steps": 1}}
    return Config.model_validate(base | more)


@pytest.mark.parametrize(
    ("train", "shard", "wanted"),
    [
        ({}, "nothing", {"parameters": 400, "gradients": 400, "optimizer": 800}),
        ({}, "optimizer", {"parameters": 400, "gradients": 400, "optimizer": 400}),
        ({}, "gradients", {"parameters": 400, "gradients": 200, "optimizer": 400}),
        ({}, "parameters", {"parameters": 200, "gradients": 200, "optimizer": 400}),
        ({"precision": "fp64"}, "nothing", {"parameters": 800, "gradients": 800, "optimizer": 1600}),
        (
            {"precision": "bf16-master"},
            "parameters",
            {"parameters": 100, "masters": 200, "gradients": 100, "optimizer": 400},
        ),
        ({"optimizer": {"name": "sgd", "lr": 0.1}}, "nothing", {"parameters": 400, "gradients": 400}),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
            "nothing",
            {"parameters": 400, "gradients": 400, "optimizer": 400},
        ),
        ({"optimizer": {"name": "rmsprop"}}, "nothing", {"parameters": 400, "gradients": 400, "optimizer": 400}),
        (
            {"optimizer": {"name": "rmsprop", "momentum": 0.9, "centered": True}},
            "optimizer",
            {"parameters": 400, "gradients": 400, "optimizer": 600},
        ),
    ],
)
def test_what_a_rank_keeps(train: dict[str, Any], shard: str, wanted: dict[str, int]) -> None:
    """Of 100 parameters on two ranks."""
    config = given(train={"steps": 1, **train}, parallel={"data": 2, "shard": shard})
    assert estimate_kept_bytes(config, 2, ModelSize(100)) == wanted


@pytest.mark.parametrize(
    ("parallel", "size", "floats"),
    [
        ({"data": 1, "tensor": 2}, ModelSize(100, blocks=3, in_blocks=60, matrices=48), 40 + 12 + 24),
        ({"data": 1, "pipeline": 2}, ModelSize(100, blocks=3, in_blocks=60, matrices=48), 40 + 40),
        ({"data": 1, "pipeline": 3, "tensor": 2}, ModelSize(100, blocks=3, in_blocks=60, matrices=48), 40 + 12),
        ({"data": 2, "context": 2}, ModelSize(100, blocks=3, in_blocks=60, matrices=48), 100),
        ({"data": 1, "tensor": 4, "pipeline": 5}, ModelSize(100), 5),
        ({"data": 4, "expert": 2}, ModelSize(100, blocks=3, in_blocks=60, matrices=48, experts=40), 40 + 20 + 20),
        ({"data": 1, "tensor": 2}, ModelSize(100, blocks=3, in_blocks=60, matrices=48, experts=40), 40 + 12 + 24),
    ],
)
def test_what_the_largest_rank_of_a_mesh_holds(parallel: dict[str, Any], size: ModelSize, floats: int) -> None:
    """Its blocks, of which a stage may have one more than another; cut matrices; and what lies outside the blocks."""
    config = given(backend="toy", parallel=parallel)
    ranks = config.parallel.ranks
    assert isinstance(ranks, int)
    kept = {"parameters": 4 * floats, "gradients": 4 * floats, "optimizer": 8 * floats}
    assert estimate_kept_bytes(config, ranks, size) == kept


def test_experts_are_split_by_their_axis_or_by_more_ranks() -> None:
    """What is sharded over all ranks is so with experts too; fewer shards than ranks of experts split no expert."""
    size = ModelSize(100, blocks=3, in_blocks=60, matrices=48, experts=40)
    parallel = {"data": 8, "expert": 4, "shard": "parameters"}
    assert estimate_kept_bytes(given(parallel=parallel), 8, size)["parameters"] == 4 * 60 // 8 + 4 * 40 // 8
    parallel["shard_over"] = 2
    assert estimate_kept_bytes(given(parallel=parallel), 8, size)["parameters"] == 4 * 60 // 2 + 4 * 40 // 4


def test_ranks_that_split_sequences_share_parameters() -> None:
    """State is sharded over the ranks of the data and of the context."""
    config = given(backend="toy", parallel={"data": 2, "context": 2, "tensor": 2, "shard": "parameters"})
    size = ModelSize(1000, blocks=4, in_blocks=800, matrices=800)
    assert estimate_kept_bytes(config, 8, size) == {"parameters": 600, "gradients": 600, "optimizer": 1200}


@pytest.mark.parametrize(
    ("total", "way"),
    [(4, "batch.micro: 2 is what can be less"), (2, "batch.micro is 1 already")],
)
def test_a_model_that_is_tried_before_it_is_split(total: int, way: str) -> None:
    """Rank 0 holds all of it then, with gradients and activations of one microbatch."""
    config = given(parallel={"data": 1, "pipeline": 2}, batch={"total": total, "accumulate": 2})
    assert suggest_what_fits(config, config.batch.settle(1), ModelSize(0), "start") == (
        f"rank 0 builds the whole model, and tries it on one microbatch, before it is split: {way}"
    )


def test_a_strategy_with_the_same_axes_is_named_first() -> None:
    """Two stages on four ranks: sharding each stage over its two ranks of the data is the smallest change."""
    config = given(parallel={"data": 2, "pipeline": 2})
    size = ModelSize(MIB, blocks=4, in_blocks=MIB, matrices=MIB)
    assert suggest_what_fits(config, config.batch.settle(2), size, "update", lack=2 * MIB) == (
        "by an estimate native/optimizer+pipeline2 (parameters, gradients and optimizer 6.0 MiB on the largest rank, "
        "here 8.0 MiB) would have fitted"
    )


def test_the_largest_microbatch_that_fits() -> None:
    """Of 12: 120 MiB move with it, so that 6 save 60 and 4 save 80; below 1 there is none."""
    config = given()
    said = "by an estimate batch.micro: {} instead of 12 would have fitted"
    assert suggest_what_fits(
        config, config.batch.settle(2), ModelSize(1), "forward", moving=120 * MIB, lack=60 * MIB
    ) == said.format(6)
    assert suggest_what_fits(
        config, config.batch.settle(2), ModelSize(1), "backward", moving=120 * MIB, lack=61 * MIB
    ) == said.format(4)
    assert suggest_what_fits(
        config, config.batch.settle(2), ModelSize(1), "forward", moving=120 * MIB, lack=111 * MIB
    ) == ("by an estimate neither a smaller batch.micro nor a strategy that splits more would have fitted")


@pytest.mark.parametrize(
    ("micro", "phase", "said"),
    [
        (2, "waiting", "by an estimate batch.micro: 1 instead of 2 needs less"),
        (1, "waiting", "no strategy here splits more, and batch.micro is 1 already"),
        (2, "update", "no strategy here splits more"),
    ],
)
def test_nothing_is_said_to_fit_where_nobody_knows_the_lack(micro: int, phase: str, said: str) -> None:
    """A rank that was killed: what needs less is named, and where nothing does, why."""
    config = given(batch={"micro": micro, "accumulate": 1}, parallel={"data": 2, "shard": "parameters"})
    assert suggest_what_fits(config, config.batch.settle(2), ModelSize(MIB), phase) == said


def test_the_strategy_that_splits_least_and_fits() -> None:
    """In the update the microbatch is no way out. A MiB of parameters keeps 16 MiB, or split 12, 10 and 8."""
    told = "by an estimate native/{} (parameters, gradients and optimizer {} MiB a rank, here 16 MiB) would have fitted"
    config = given()
    assert suggest_what_fits(config, config.batch.settle(2), ModelSize(MIB), "update", lack=4 * MIB) == told.format(
        "optimizer", 12
    )
    assert suggest_what_fits(config, config.batch.settle(2), ModelSize(MIB), "update", lack=5 * MIB) == told.format(
        "gradients", 10
    )
    assert suggest_what_fits(config, config.batch.settle(2), ModelSize(MIB), "update", lack=8 * MIB) == told.format(
        "parameters", "8.0"
    )
    config = given(backend="horovod")
    elsewhere = suggest_what_fits(config, config.batch.settle(2), ModelSize(MIB), "update", lack=4 * MIB)
    assert elsewhere.startswith("by an estimate accelerate/gradients (")
