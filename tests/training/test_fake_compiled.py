"""A step under torch.compile on tensors without memory: the compiler's own code runs, and nothing of it is left."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unipar
from unipar.config.config_source import load_given_config
from unipar.training.fake_run import compiled as compiled_module
from unipar.training.fake_run.compiled import run_until_compiled
from unipar.training.fake_run.task_traces import TaskTraces
from unipar.training.fake_run.trace_task import TracedTask

TASK = """
import torch
from torch import nn
from unipar import Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.other(self.one(x).tanh().exp().sin())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range({blocks})])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Small(Task):
    def model(self):
        return Model()
    def data(self):
        return torch.utils.data.TensorDataset(torch.zeros(64, 256, 16))
    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""

HIDDEN = 2 * 256 * 64 * 4
"""Bytes of what is between the two layers of a block, in a microbatch of two samples."""


def traces(tmp_path: Path, compiling: Any, blocks: int = 2, recompute: str = "none") -> TaskTraces:
    (tmp_path / f"small{blocks}.py").write_text(TASK.format(blocks=blocks), "utf-8")
    config = {
        "task": {"use": f"{tmp_path}/small{blocks}.py:Small"},
        "batch": {"total": 8},
        "device": "cpu",
        "train": {"steps": 1},
        "model": {"compile": compiling, "recompute": recompute},
    }
    return TaskTraces(load_given_config(config).config, 2)


def kept_of_hidden(found: TracedTask) -> int:
    """Return how many tensors of the hidden size the forward leaves to the backward."""
    began = next(tick for tick, moment in found.activations.moments if moment[:2] == ("backward", "begin"))
    return sum(block.size(2) == HIDDEN for block in found.activations.alive(began))


def of(found: TaskTraces, micro: int = 2) -> TracedTask:
    config = found._fake.config  # pyright: ignore[reportPrivateUsage]
    (only,) = found.of(config, micro)
    return only


def test_what_inductor_keeps(tmp_path: Path) -> None:
    """Of the three tensors between two layers it keeps two from forward to backward; without it, all are kept."""
    compiled, plain = traces(tmp_path, True), traces(tmp_path, False)
    assert compiled.whole.assumed == ()
    assert kept_of_hidden(of(plain)) == 2 * 3
    assert kept_of_hidden(of(compiled)) == 2 * 2
    assert of(compiled).activations.flops == of(plain).activations.flops
    assert len(of(compiled).activations.blocks) < len(of(plain).activations.blocks)


def test_each_size_is_traced(tmp_path: Path) -> None:
    """A microbatch of three samples has memory of its own, and not that of a line through others."""
    found = traces(tmp_path, {"what": "blocks", "backend": "aot_eager"})
    two, three = of(found, 2), of(found, 3)
    assert {b.slope for b in two.activations.blocks + three.activations.blocks} == {0.0}
    sizes = [
        sum(b.base == HIDDEN * micro / 2 for b in each.activations.blocks) for micro, each in ((2, two), (3, three))
    ]
    assert sizes[0] == sizes[1] > 4
    assert of(found, 2) is two


def test_equal_blocks_are_compiled_once(tmp_path: Path) -> None:
    """Eight blocks have the memory of three, with the five between them once each."""
    compiling = {"what": "blocks", "backend": "aot_eager"}
    few, many = traces(tmp_path, compiling, blocks=3), traces(tmp_path, compiling, blocks=8)
    assert kept_of_hidden(of(few)) == 3 * 3
    assert kept_of_hidden(of(many)) == 8 * 3
    assert many.whole.assumed == ()


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    """The model has its own forward again, and what is compiled later computes."""
    found = traces(tmp_path, True)
    model = found._fake.model  # pyright: ignore[reportPrivateUsage]
    assert all("forward" not in vars(module) for module in model.modules())
    guards: Any = import_module("torch._C._dynamo.guards")
    made = guards._empty_strided_cpu((2,), (1,), torch.float32)
    assert type(made) is torch.Tensor
    layer = nn.Linear(2, 2)
    again: Any = torch.compile(layer.forward, backend="aot_eager")
    x = torch.ones(1, 2)
    assert torch.equal(again(x), layer(x))
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]


def test_a_compiler_that_needs_values(tmp_path: Path) -> None:
    """Such a model is planned as if it were off, and the plan says so."""
    found = traces(tmp_path, {"what": "blocks", "backend": "cudagraphs"})
    assert found.whole.assumed == (
        "model.compile is planned as if it were off (TaskError: what cudagraphs compiles cannot run without values; "
        "inductor, aot_eager, aot_eager_decomp_partition and eager can)",
    )
    assert kept_of_hidden(of(found)) == 2 * 3


def test_a_plan_for_gpus_tells_whose_code_it_is(tmp_path: Path) -> None:
    """torch's compiler writes for the CPU, where tensors without memory are."""
    (tmp_path / "gpu.py").write_text(TASK.format(blocks=2), "utf-8")
    config: dict[str, Any] = {
        "task": {"use": f"{tmp_path}/gpu.py:Small"},
        "batch": {"total": 8},
        "train": {"steps": 1},
        "model": {"compile": {"what": "blocks", "backend": "aot_eager"}},
    }
    line = "model.compile: buffers are those of the code that torch's compiler writes for the CPU"
    assert line in unipar.plan(config, strategies=["single"], device="cuda").notes
    assert line not in unipar.plan(config, strategies=["single"], device="cpu").notes


def test_a_compiler_that_does_not_exist(tmp_path: Path) -> None:
    """The line names those that torch knows."""
    found = traces(tmp_path, {"what": "blocks", "backend": "inductr"})
    (line,) = found.whole.assumed
    assert line.startswith(
        "model.compile is planned as if it were off (ConfigError: model.compile.backend: there is no 'inductr'; "
        "torch knows aot_eager, "
    )


def test_a_model_that_is_compiled_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model has no step to be recorded."""
    graphs = iter(range(100))
    monkeypatch.setattr(compiled_module, "graphs_compiled", lambda: next(graphs))
    with pytest.raises(
        Exception,
        match=r"^the model is compiled again in each of 4 steps, so that it cannot be planned; set "
        r"model.compile: false$",
    ):
        run_until_compiled(lambda: None)


def test_libraries_that_divide_what_is_compiled(tmp_path: Path) -> None:
    """FSDP2 breaks up a model that is compiled as one, and ZeRO 3 each block; the other strategies are planned."""
    (tmp_path / "one.py").write_text(TASK.format(blocks=2), "utf-8")
    config: dict[str, Any] = {"task": {"use": f"{tmp_path}/one.py:Small"}, "batch": {"total": 8}, "device": "cpu"}
    strategies = ["native/nothing", "native/parameters", "deepspeed/gradients", "deepspeed/parameters"]
    refused: list[dict[str, str]] = []
    for what in ("model", "blocks"):
        model = {"compile": {"what": what, "backend": "aot_eager"}}
        planned = unipar.plan({**config, "model": model, "train": {"steps": 1}}, strategies=strategies, worlds=[2])
        refused.append({row.strategy: row.refusal for row in planned.rows if row.refusal})
    zero = (
        "deepspeed/parameters: model.compile under ZeRO 3, which divides what is compiled, is not planned yet; "
        "`unipar compare` measures it"
    )
    fsdp2 = (
        "native/parameters: model.compile: model under FSDP2, which divides what is compiled, is not planned yet; "
        "`unipar compare` measures it"
    )
    assert refused == [
        {"native/parameters": fsdp2, "deepspeed/parameters": zero},
        {"deepspeed/parameters": zero},
    ]
