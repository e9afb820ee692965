"""DeepSpeed's AutoTP by unipar's plan: which elements a rank has, what DeepSpeed is told, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override
from unipar_deepspeed.autotp import arm_as_autotp, matrices_left_whole
from unipar_deepspeed.tensor_parallel_by_plan import TensorSplit, regions_of_range
from unipar_mesh.tensor.cuts import BlockPlan, Cut, ParameterCut

from tests.support.forks import ROOT, Forks
from unipar.backend.checks import check_can_run
from unipar.config import Config
from unipar.distributed.mesh import Mesh, fake_groups
from unipar.errors import Unsupported

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # the library's own, while it is imported

CUTS = {
    "column": ParameterCut((6, 5), 0, Cut("column"), 2),
    "row": ParameterCut((3, 8), 1, Cut("row"), 2),
    "three groups": ParameterCut((12, 2), 0, Cut("column", 3), 2),
    "groups of two sizes": ParameterCut((12, 2), 0, Cut("column", 2, (8, 4)), 2),
    "rows in groups": ParameterCut((3, 8), 1, Cut("row", 2), 2),
    "bias": ParameterCut((12,), 0, Cut("column", 3), 2),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("seat", [0, 1])
def test_regions_of_every_range(name: str, seat: int) -> None:
    """Each range of a part holds the elements of the whole that its regions name, in their places."""
    cut = CUTS[name]
    whole = torch.arange(torch.Size(cut.shape).numel()).view(cut.shape)
    part = cut.local(whole, seat).view(-1)
    for start in range(len(part)):
        for length in range(1, len(part) - start + 1):
            found = torch.full((length,), -1)
            for where, local in regions_of_range(cut, seat, start, length):
                local.of(found).copy_(where.of(whole))
            assert torch.equal(found, part[start : start + length]), (start, length)


def test_what_deepspeed_is_told() -> None:
    """Each matrix by its whole name, a fused one with the shape of its groups; no head is cut by name."""
    cuts = {"qkv": Cut("column", 3), "kv": Cut("column", 2, (8, 4)), "out": Cut("row")}
    split = TensorSplit(None, {"layers.0": BlockPlan(cuts, {}, 1, 2)}, {}, 0)
    assert split.section("model.") == {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "lm_head_patterns": ["(none)"],
            "layer_specs": [
                {"patterns": [r"model\.layers\.0\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1],
                 "partition_dim": 0},
                {"patterns": [r"model\.layers\.0\.kv\.weight$"], "partition_type": "column", "shape": [[8, 4], -1],
                 "partition_dim": 0},
                {"patterns": [r"model\.layers\.0\.out\.weight$"], "partition_type": "row"},
            ],
        },
    }  # fmt: skip


def test_layers_that_deepspeed_does_not_cut() -> None:
    """They stay whole, and the plan says why."""
    block = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 8)})
    why = "AutoTP replaces linear layers, and nn.MultiheadAttention keeps its projections itself"
    assert matrices_left_whole(block) == {"attention": why, "attention.out_proj": why}


@final
class _Operations(TorchDispatchMode):
    """Mode that lists operations, each with the shape of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found.append((str(func), tuple(out.shape) if isinstance(out, Tensor) else ()))
        return out


def _operations(block: nn.Module, *, autocast: bool) -> list[tuple[str, tuple[int, ...]]]:
    x = torch.zeros(2, 3, 4, requires_grad=True)
    with _Operations() as operations, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        block(x).sum().backward()
    return operations.found


def _two_layers() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))


def test_a_plan_runs_what_its_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations in the same order as DeepSpeed's own layers, forward and backward, also under autocast."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.module_inject import layers

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
    with fake_groups(Mesh.of(0, 2, tensor=2)) as groups:
        deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)
        layers.set_autotp_mode(training=True)
        group = groups.group("tensor")
        theirs, ours = _two_layers(), _two_layers()
        theirs[0], theirs[2] = layers.LinearLayer(theirs[0], group), layers.LinearAllreduce(theirs[2], group)
        ours[0], ours[2].weight = nn.Linear(4, 3), nn.Parameter(torch.zeros(4, 3))
        arm_as_autotp(ours, BlockPlan({"0": Cut("column"), "2": Cut("row")}, {}, 1, 2), group)
        for autocast in (False, True):
            operations = _operations(ours, autocast=autocast)
            assert operations == _operations(theirs, autocast=autocast)
            assert [name for name, _ in operations].count("c10d.allreduce_.default") == 2


@pytest.mark.parametrize(
    ("backend", "more", "why"),
    [
        ("deepspeed", {"parallel": {"tensor": 2, "sequence": True}},
         "parallel.sequence: true is not available: DeepSpeed's AutoTP keeps activations whole between the matrices "
         "that it cuts; leave it out, or use backend: native"),
        ("deepspeed", {"parallel": {"tensor": 2}, "train": {"precision": "bf16-master"}},
         "train.precision: bf16-master is not available with parallel.tensor: DeepSpeed keeps bf16 copies of the "
         "parameters, with which the split model cannot be proved equal to the whole one; use fp32 or bf16-mixed, or "
         "backend: native"),
        *(
            ("deepspeed", {"parallel": {"tensor": 2}, "train": {"precision": precision}},
             f"train.precision: {precision} is not available with parallel.tensor: DeepSpeed's AutoTP puts layers of "
             "its own, which multiply in bf16, in the place of the model's linear layers; use bf16-mixed, or backend: "
             "native")
            for precision in ("fp8", "fp8-rowwise")
        ),
        ("deepspeed", {"parallel": {"tensor": 2, "shard": "gradients"},
                       "options": {"deepspeed": {"offload_optimizer": "cpu", "cpu_adam": "torch"}}},
         "offloading is not available with parallel.tensor: no run of DeepSpeed's AutoTP with offloaded state has been "
         "compared with one process; leave one of them out"),
        ("deepspeed", {"parallel": {"tensor": 2}, "model": {"compile": {"what": "model"}}},
         "model.compile: model is not available with parallel.tensor: torch cannot compile the layers that DeepSpeed's "
         "AutoTP puts in their place; compile blocks"),
        ("deepspeed", {"parallel": {"pipeline": 2}},
         "DeepSpeed's PipelineModule takes a list of layers, so the model would have to be rewritten; with a clip and "
         "ZeRO-0 it was 2e-3 off one process, and it refuses ZeRO-2 and ZeRO-3"),
        ("deepspeed", {"parallel": {"context": 2}},
         "DeepSpeed's Ulysses is an attention layer, which has to be written into the model"),
        ("horovod", {"parallel": {"tensor": 2}}, "Horovod sums tensors over ranks and has no part that splits a model"),
        ("accelerate", {"parallel": {"pipeline": 2}}, "Accelerate runs pipelines for inference alone"),
    ],
)  # fmt: skip
def test_refusals(backend: str, more: dict[str, Any], why: str) -> None:
    """What a library does not do is refused before any process starts, with the reason."""
    made: dict[str, Any] = {"backend": backend, "device": "cpu", "batch": {"total": 8}}
    made |= more | {"parallel": {"data": 1, **more["parallel"]}, "train": {"steps": 1, **more.get("train", {})}}
    with pytest.raises(Unsupported) as caught:
        check_can_run(Config.model_validate(made))
    assert [reason for reason in caught.value.reasons if reason.endswith(why)]


WRONG = """
from dataclasses import replace
from unipar_mesh.tensor import tensor_model
from examples.char_gpt import CharGPT

derive = tensor_model.derive_block_plan

def ungrouped(*given):
    plan = derive(*given)
    return replace(plan, cuts={name: replace(cut, groups=1, sizes=()) for name, cut in plan.cuts.items()})

class Wrong(CharGPT):
    def model(self):
        tensor_model.derive_block_plan = ungrouped
        return super().model()
"""


def test_a_wrong_plan_is_refused_by_the_proof(tmp_path: Path, forks: Forks) -> None:
    """A fused projection that is cut as one matrix trains another model: no step is taken."""
    (tmp_path / "wrong.py").write_text(WRONG, "utf-8")
    config: dict[str, Any] = {
        "task": {"use": "wrong.py:Wrong", "args": {"layers": 2, "width": 16, "heads": 2, "context": 8}},
        "backend": "deepspeed",
        "device": "cpu",
        "parallel": {"data": 1, "tensor": 2},
        "batch": {"total": 4},
        "train": {"steps": 2},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config), "utf-8")
    done = forks.python(("-m", "unipar", "run", "c.yaml"), tmp_path, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2, done.stderr[-2000:]
    assert "split as planned, the model is another: a loss of " in done.stderr
