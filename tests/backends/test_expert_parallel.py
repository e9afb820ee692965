"""Experts over ranks: which layers are found, what is refused, and training that is that of one process."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override
from unipar_mesh.engine import MeshEngine
from unipar_mesh.expert import exchange
from unipar_mesh.expert.expert_layer import ExpertLayer
from unipar_mesh.expert.find_experts import find_experts

import unipar
from tests.support.expert_models import EXPERTS, WIDTH, Mixture, Net, OfTransformers, OfUser, StackedExperts
from tests.support.world import ROOT
from unipar.backend import Part
from unipar.backend.registry import find_backend
from unipar.config import Config
from unipar.errors import TaskError
from unipar.training.task_facts import describe_split

HERE = Path(__file__)
TASKS = f"{ROOT}/tests/support/expert_models.py"


def part_of(task: OfTransformers | OfUser, experts: list[str] | None = None) -> Part:
    """Return the task's model as an engine gets it; its blocks are those of the list `layers`."""
    model = task.model()
    (prefix,) = {name.rpartition(".layers")[0] for name, _ in model.named_modules() if name.endswith(".layers.0")} or {
        ""
    }
    blocks = [f"{prefix}.layers.{i}".lstrip(".") for i in range(2)]
    return Part("model", model, lambda m: torch.optim.SGD(m.parameters(), 0.1), blocks, task.loss, experts=experts)


def batch_of(task: OfTransformers | OfUser) -> Any:
    return (task.data()[0][0][None],)


def layers_of(task: OfTransformers | OfUser, ranks: int = 2, experts: list[str] | None = None) -> list[ExpertLayer]:
    return find_experts(part_of(task, experts), batch_of(task), ranks)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Mixtral", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        ("Qwen3Moe", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        ("DeepseekV3", ["model.layers.1.mlp.experts"]),
        ("GptOss", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        ("Olmoe", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
    ],
)
def test_layers_of_transformers(name: str, layers: list[str]) -> None:
    """Modules with stacked parameters are found; shared experts and dense layers are not among them."""
    assert layers_of(OfTransformers(name)) == [
        ExpertLayer(layer, "stacked", EXPERTS, (0, 1, 2), ("num_experts",)) for layer in layers
    ]


def test_layers_of_a_user() -> None:
    """Stacked parameters have any names, and a list of equal modules is a layer, too."""
    assert layers_of(OfUser("stacked")) == [
        ExpertLayer(f"layers.{i}.mixture.experts", "stacked", EXPERTS) for i in (0, 1)
    ]
    assert layers_of(OfUser("list"), ranks=4) == [
        ExpertLayer(f"layers.{i}.mixture.experts", "list", EXPERTS, like=0) for i in (0, 1)
    ]
    assert [layer.name for layer in layers_of(OfUser("list"), experts=["layers.1.mixture.experts"])] == [
        "layers.1.mixture.experts"
    ]


class Dropping(StackedExperts):
    """Experts that take the first rows alone."""

    @override
    def forward(self, rows: Tensor, which: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows, which, weights.masked_fill(torch.arange(len(rows))[:, None] > 3, 0.0))


class Changed(OfUser):
    """A user's mixture with other layers of experts."""

    def __init__(self, make: Any) -> None:
        super().__init__("list")
        self.make = make

    @override
    def model(self) -> nn.Module:
        net = Net("list", EXPERTS)
        for layer in net.layers:
            layer.mixture = self.make()
        return net


def with_experts(experts: Any, kind: str = "list") -> Any:
    """Return a function that makes a mixture with these experts."""

    def make() -> Mixture:
        mixture = Mixture(kind, EXPERTS)
        mixture.experts = experts()
        return mixture

    return make


def unequal() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8 + i), nn.Linear(8 + i, WIDTH)) for i in range(EXPERTS))


WAY_OUT = (
    ": leave expert out, or name modules with stacked parameters, called with rows, numbers of experts and weights, or "
    "lists of equal modules, in the task's experts(model)"
)


@pytest.mark.parametrize(
    ("task", "ranks", "experts", "sentence"),
    [
        (
            Changed(lambda: nn.Linear(WIDTH, WIDTH)),
            2,
            None,
            f"parallel.expert: 2 splits experts, and no layer of this model has any{WAY_OUT}",
        ),
        (
            OfUser("stacked"),
            3,
            None,
            "parallel.expert: 3: layers.0.mixture.experts: 3 ranks do not divide its 8 experts: take one of 2, 4, 8",
        ),
        (
            OfUser("list"),
            16,
            None,
            "parallel.expert: 16: layers.0.mixture.experts: 16 ranks do not divide its 8 experts: take one of 2, 4, 8",
        ),
        (
            Changed(with_experts(unequal)),
            2,
            ["layers.0.mixture.experts"],
            "parallel.expert: 2 splits experts, and a layer that experts() names is none (layers.0.mixture.experts: "
            f"its experts differ in class or shapes){WAY_OUT}",
        ),
        (
            Changed(with_experts(lambda: Dropping(EXPERTS), "stacked")),
            2,
            None,
            "parallel.expert: 2 splits experts, and no layer of this model has any (layers.0.mixture.experts: it "
            "returns something else when its experts compute one row each by themselves (off by N of the largest "
            "output): it drops tokens, or mixes rows, layers.1.mixture.experts: it returns something else when its "
            "experts compute one row each by themselves (off by N of the largest output): it drops tokens, or mixes "
            f"rows){WAY_OUT}",
        ),
        (
            OfUser("list"),
            2,
            ["layers.0.experts"],
            "experts() names 'layers.0.experts', and the model has no such module: name modules with stacked "
            "parameters, or lists of equal modules",
        ),
    ],
)
def test_refused(task: OfUser, ranks: int, experts: list[str] | None, sentence: str) -> None:
    """With numbers and the way out."""
    torch.manual_seed(0)
    with pytest.raises(TaskError) as caught:
        layers_of(task, ranks, experts)
    assert re.sub(r"off by [\d.e+-]+ of", "off by N of", str(caught.value)) == sentence


def config_of(folder: Path, task: str, args: dict[str, Any], parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "task": {"use": task if ":" in task else f"{TASKS}:{task}", "args": args},
        "device": "cpu",
        "parallel": {"data": 2, **parallel},
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 3, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.5},
        "log": {"every": 1},
        "out": str(folder / "-".join(["run", *map(str, parallel.values())])),
        **more,
    }


def losses(*args: Any, **more: Any) -> list[float]:
    return [loss for _, loss in unipar.launch(config_of(*args, **more), quiet=True).losses]


class BesideMatrices(OfUser):
    """A user's mixture, before which two matrices can be cut over `tensor`."""

    @override
    def model(self) -> nn.Module:
        net: Any = super().model()
        for layer in net.layers:
            layer.mix = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        return net


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("task", "args", "parallel"),
    [
        ("OfUser", {"kind": "list"}, {"expert": 2}),
        ("OfTransformers", {"name": "DeepseekV3"}, {"expert": 2, "shard": "parameters"}),
        pytest.param("OfUser", {"kind": "stacked"}, {"data": 4, "expert": 4}, marks=pytest.mark.sweep),
        pytest.param(
            "OfUser", {"kind": "list"}, {"data": 4, "expert": 2, "shard": "parameters"}, marks=pytest.mark.sweep
        ),
        pytest.param(
            "OfTransformers",
            {"auxiliary": False},
            {"expert": 2, "pipeline": 2, "shard": "optimizer"},
            marks=pytest.mark.sweep,
        ),
        pytest.param("OfTransformers", {"auxiliary": False}, {"expert": 2, "context": 2}, marks=pytest.mark.sweep),
        pytest.param(f"{HERE}:BesideMatrices", {"kind": "list"}, {"expert": 2, "tensor": 2}, marks=pytest.mark.sweep),
    ],
)
def test_training_is_that_of_one_process(
    tmp_path: Path, task: str, args: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """Losses of steps whose gradients are clipped, so that a norm which counts experts twice is seen."""
    alone = losses(tmp_path, task, args, {"data": 1}, backend="single")
    assert losses(tmp_path, task, args, parallel) == pytest.approx(alone, rel=1e-5)


class Swapped(OfUser):
    """A user's mixture, on ranks that put rows from others into other places."""

    @override
    def model(self) -> nn.Module:
        back = exchange.Exchange.back
        exchange.Exchange.back = lambda self, rows: back(self, rows).roll(1, 0)
        return super().model()


class Undivided(OfUser):
    """A user's mixture, on ranks that leave gradients of experts as FSDP2 averages them."""

    @override
    def model(self) -> nn.Module:
        MeshEngine.finish_reduction = lambda self: None
        return super().model()


@pytest.mark.usefixtures("forked")
def test_rows_that_come_back_in_other_places(tmp_path: Path) -> None:
    """The proof before the first step sees them: ranks are tried on different microbatches."""
    with pytest.raises(TaskError, match=r"^split as planned, the model is another: a loss of "):
        losses(tmp_path, f"{Path(__file__)}:Swapped", {}, {"expert": 2})


@pytest.mark.usefixtures("forked")
def test_gradients_of_experts_that_are_not_divided(tmp_path: Path) -> None:
    """The proof names a parameter of experts, whose gradient is twice as long."""
    with pytest.raises(
        TaskError, match=r"the gradient of layers\.\d\.mixture\.experts\.\w+ is off by 1\.0e\+00 of its"
    ):
        losses(tmp_path, f"{Path(__file__)}:Undivided", {}, {"expert": 2})


class Apart(OfUser):
    """A user's mixture that is refused if FSDP2 has its experts."""

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        if isinstance(model.layers[0].mixture.experts.up, DTensor):
            raise TaskError("FSDP2 has the experts")
        return super().loss(model, batch)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("parallel", "apart"),
    [
        ({"expert": 2, "shard": "parameters"}, True),
        pytest.param({"data": 4, "expert": 2}, False, marks=pytest.mark.sweep),
    ],
)
def test_experts_that_no_other_rank_trains(tmp_path: Path, parallel: dict[str, Any], apart: bool) -> None:
    """FSDP2 does not have them: it would copy them to gather them, and again to reduce their gradients."""
    expected = nullcontext() if apart else pytest.raises(TaskError, match=r"^FSDP2 has the experts")
    with expected:
        losses(tmp_path, f"{Path(__file__)}:Apart", {}, parallel)


class FixedRouter(nn.Module):
    """Mixture whose tokens go to experts by their place in the microbatch: evenly, or most of them to the first."""

    def __init__(self, kind: str, even: bool) -> None:
        super().__init__()
        mixture = Mixture(kind, EXPERTS)
        self.even, self.experts, self.shared = even, mixture.experts, mixture.shared

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        place = torch.arange(len(rows), device=rows.device)
        first = place % EXPERTS if self.even else torch.zeros_like(place)
        which = torch.stack([first, (place + 1) % EXPERTS if self.even else 1 + place % 3], 1)
        weights = torch.full_like(which, 0.5, dtype=rows.dtype)
        if isinstance(self.experts, StackedExperts):
            return (self.experts(rows, which, weights) + self.shared(rows)).view_as(hidden)
        out = self.shared(rows)
        for number, expert in enumerate(self.experts):
            row, slot = (which == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, (expert(rows[row]) * weights[row, slot, None]).to(out.dtype))
        return out.view_as(hidden)


class Routed(OfUser):
    """A mixture with one uneven layer and one that is even."""

    @override
    def model(self) -> nn.Module:
        net = Net(self.kind, EXPERTS)
        for layer, even in zip(net.layers, (False, True), strict=True):
            layer.mixture = FixedRouter(self.kind, even)
        return net

    @override
    def validation(self) -> Any:
        return self.data()


UNEVEN = {"fullest": 4.0, "entropy": 0.597, "unused": 4, "rank": 2.0, "microbatch": 2.0}
EVEN = {"fullest": 1.0, "entropy": 1.0, "unused": 0, "rank": 1.0, "microbatch": 1.0}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("kind", "parallel", "more"),
    [
        ("stacked", {"expert": 2}, {"model": {"recompute": "blocks"}, "eval": {"every": 1}}),
        ("list", {"expert": 2}, {}),
        pytest.param("stacked", {"data": 2, "expert": 2, "tensor": 2}, {}, marks=pytest.mark.sweep),
        pytest.param("stacked", {"data": 2, "expert": 2, "pipeline": 2}, {}, marks=pytest.mark.sweep),
    ],
)
def test_tokens_of_experts(tmp_path: Path, kind: str, parallel: dict[str, Any], more: dict[str, Any]) -> None:
    """Each token counts once: 8 samples of 12 words for 2 experts are 192 in a step, and two steps are in one row."""
    config = config_of(tmp_path, f"{Path(__file__)}:Routed", {"kind": kind}, parallel, log={"every": 2}, **more)
    report = unipar.launch(config, quiet=True)
    assert report.experts == [
        (
            step,
            {
                "layers.0.mixture.experts": {"tokens": [n * steps for n in (96, 32, 32, 32, 0, 0, 0, 0)], **UNEVEN},
                "layers.1.mixture.experts": {"tokens": [24 * steps] * 8, **EVEN},
            },
        )
        for step, steps in ((1, 1), (3, 2))
    ]


@pytest.mark.sweep
@pytest.mark.usefixtures("forked")
def test_tokens_of_parts_of_sequences(tmp_path: Path) -> None:
    """Under `context` each token counts once too, and not again where a block is tried on a part."""
    config = config_of(tmp_path, "OfTransformers", {"auxiliary": False}, {"expert": 2, "context": 2})
    report = unipar.launch(config, quiet=True)
    assert [sum(layer["tokens"]) for _, layers in report.experts for layer in layers.values()] == [192] * 6


def test_explained_cuts_beside_experts(tmp_path: Path) -> None:
    """Attention of a mixture is cut over `tensor`, as in a run, and its experts are named as what stays whole."""
    config = Config.model_validate(config_of(tmp_path, "OfTransformers", {}, {"data": 1, "tensor": 2}))
    sentences = describe_split(config, config.batch.settle(1), find_backend("native"))
    whole = "stays whole: it is not the weight of a linear layer"
    assert sentences[:-1] == [
        "model.layers.0 and 1 more: columns self_attn.q_proj, self_attn.k_proj, self_attn.v_proj; rows "
        "self_attn.o_proj",
        f"model.layers.0: mlp.gate.weight {whole}",
        f"model.layers.0: mlp.experts.gate_up_proj {whole}",
        f"model.layers.0: mlp.experts.down_proj {whole}",
    ]
