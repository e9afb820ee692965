"""DeepSpeed's AutoEP: which elements a rank has, what DeepSpeed is told, what is refused, and trainings that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override
from unipar_deepspeed import expert_parallel
from unipar_deepspeed.expert_parallel import ExpertPart, ExpertSplit
from unipar_mesh.expert import token_counts

import unipar
from tests.support.expert_models import OfTransformers, OfUser
from tests.support.world import ROOT
from unipar.backend.checks import check_can_run
from unipar.config import Config
from unipar.errors import TaskError, Unsupported

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # the library's own, while it is imported

TASKS = f"{ROOT}/tests/support/expert_models.py"
PARTS = {
    "gates of the second half": ExpertPart("gate_up_proj", (4, 6, 2), 24, 6),
    "ups of the second half": ExpertPart("gate_up_proj", (4, 6, 2), 30, 6),
    "whole matrices": ExpertPart("down_proj", (4, 2, 3), 12, 6),
}


@pytest.mark.parametrize("name", PARTS)
def test_regions_of_every_range(name: str) -> None:
    """Each range of a part holds the elements of the whole that its regions name, in their places."""
    part = PARTS[name]
    row = torch.Size(part.shape[1:]).numel()
    whole = torch.arange(torch.Size(part.shape).numel()).view(part.shape)
    mine = torch.cat([whole.view(-1)[part.first + row * i :][: part.width] for i in (0, 1)])
    for start in range(len(mine)):
        for length in range(1, len(mine) - start + 1):
            found = torch.full((length,), -1)
            for where, local in part.regions(start, length):
                local.of(found).copy_(where.of(whole))
            assert torch.equal(found, mine[start : start + length]), (start, length)


def split_of(task: OfTransformers | OfUser, ranks: int = 2, seat: int = 1) -> ExpertSplit:
    return ExpertSplit.of(task.model(), None, ranks, seat)


@pytest.mark.parametrize(
    ("name", "preset", "layers"),
    [
        ("Mixtral", "mixtral", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("Qwen3Moe", "qwen3_moe", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("DeepseekV3", "deepseek_v3", ["model.layers.1.mlp"]),
    ],
)
def test_what_deepspeed_is_told(name: str, preset: str, layers: list[str]) -> None:
    """The preset by the model's type, and the layers by their whole names."""
    assert split_of(OfTransformers(name)).section("model.") == {
        "enabled": True,
        "autoep_size": 2,
        "preset_model": preset,
        "moe_layer_pattern": "|".join("model." + layer for layer in layers).replace(".", r"\."),
        "gate_up_impl": "fused",
        "disable_triton_grouped_mm": True,
    }


def test_names_of_the_user() -> None:
    """Parameters of AutoEP are parts of the user's, and the router and shared experts have the user's names."""
    split = split_of(OfTransformers("DeepseekV3"))
    layer = "model.layers.1.mlp"
    names = ["experts.w1", "experts.w2", "experts.w3", "router.gate.weight", "router.e_score_correction_bias"]
    assert [split.saved_name(f"{layer}.{name}") for name in names] == [
        f"{layer}.experts.gate_up_proj",
        f"{layer}.experts.down_proj",
        f"{layer}.experts.gate_up_proj",
        f"{layer}.gate.weight",
        f"{layer}.gate.e_score_correction_bias",
    ]
    assert split.saved_name(f"{layer}.shared_experts.up_proj.weight") == f"{layer}.shared_experts.up_proj.weight"
    assert split.saved_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"


class Gpt2Config:
    model_type = "gpt2"


def of_another_type() -> nn.Module:
    model: Any = OfTransformers("Mixtral").model()
    model.config = model.model.config = Gpt2Config()
    return model


@pytest.mark.parametrize(
    ("make", "ranks", "sentence"),
    [
        (
            OfUser("list").model,
            2,
            "parallel.expert: 2 by DeepSpeed's AutoEP needs layers with a router named gate and experts named experts, "
            "whose gate_up_proj and down_proj are stacked, and this model has none (it has no stacked matrices): use "
            "backend: native, which finds experts by trial, or leave expert out",
        ),
        (
            OfTransformers("GptOss").model,
            2,
            "parallel.expert: 2 by DeepSpeed's AutoEP needs layers with a router named gate and experts named experts, "
            "whose gate_up_proj and down_proj are stacked, and this model has none (stacked matrices are in "
            "model.layers.0.mlp.experts, model.layers.1.mlp.experts): use backend: native, which finds experts by "
            "trial, or leave expert out",
        ),
        (
            OfTransformers("Mixtral").model,
            3,
            "parallel.expert: 3 does not divide the 8 experts of model.layers.0.mlp: give a divisor of 8",
        ),
        (
            of_another_type,
            2,
            "DeepSpeed's AutoEP has presets for mixtral, qwen3_moe, qwen3_5_moe, deepseek_v2, deepseek_v3, minimax_m3, "
            "and the config of this model (gpt2) has the numbers of none: use backend: native, or leave expert out",
        ),
    ],
)
def test_refused_models(make: Any, ranks: int, sentence: str) -> None:
    """With what was looked for, and the way out."""
    with pytest.raises(TaskError) as caught:
        ExpertSplit.of(make(), None, ranks, 0)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"parallel": {"tensor": 2}},
         "parallel.tensor: 2 is not available with parallel.expert: no run of DeepSpeed's AutoEP beside AutoTP has "
         "been compared with one process; leave one of them out, or use backend: native"),
        ({"train": {"precision": "bf16-master"}},
         "train.precision: bf16-master is not available with parallel.expert: DeepSpeed keeps bf16 copies of the "
         "parameters, with which the split model cannot be proved equal to the whole one; use fp32 or bf16-mixed, or "
         "backend: native"),
        ({"train": {"precision": "fp64"}},
         "train.precision: fp64 is not available with parallel.expert: DeepSpeed's AutoEP multiplies the matrices of "
         "experts by a kernel that has no fp64; use fp32 or bf16-mixed, or backend: native"),
        ({"parallel": {"shard": "optimizer"}, "options": {"deepspeed": {"contiguous": False}}},
         "options.deepspeed.contiguous: false is not available with parallel.expert: DeepSpeed's ZeRO-1 then trains "
         "another model (the first norm was off by 1.5e-01), and its ZeRO-2 raises an error; leave it out"),
        ({"parallel": {"shard": "gradients"},
          "options": {"deepspeed": {"offload_optimizer": "cpu", "cpu_adam": "torch"}}},
         "offloading is not available with parallel.expert: no run of DeepSpeed's AutoEP with offloaded state has been "
         "compared with one process; leave one of them out"),
        ({"model": {"compile": True}},
         "model.compile is not available with parallel.expert: no compiled run of DeepSpeed's AutoEP has been compared "
         "with one process; leave one of them out, or use backend: native"),
        ({"train": {"optimizer": {"name": "muon", "lr": 0.1}}},
         "train.optimizer.name: muon is not available with parallel.expert: DeepSpeed's AutoEP keeps each gate_up_proj "
         "as two parameters, whose matrices are halves of those that are updated as a whole; use backend: native, or "
         "take adamw"),
    ],
)  # fmt: skip
def test_refused_configs(more: dict[str, Any], why: str) -> None:
    """What has not been compared with one process is refused before any process starts, with the reason."""
    made: dict[str, Any] = {"backend": "deepspeed", "device": "cpu", "batch": {"total": 8}} | more
    made["parallel"] = {"data": 2, "expert": 2, **more.get("parallel", {})}
    made["train"] = {"steps": 1, **more.get("train", {})}
    with pytest.raises(Unsupported) as caught:
        check_can_run(Config.model_validate(made))
    assert [reason for reason in caught.value.reasons if reason.endswith(why)], caught.value.reasons


def config_of(folder: Path, name: str, args: dict[str, Any], parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "task": {"use": f"{TASKS}:OfTransformers", "args": args},
        "device": "cpu",
        "parallel": {"data": 2, **parallel},
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 3, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.5},
        "log": {"every": 1},
        "out": str(folder / name),
        **more,
    }


def losses(*args: Any, **more: Any) -> list[float]:
    return [loss for _, loss in unipar.launch(config_of(*args, **more), quiet=True).losses]


@pytest.mark.parametrize(
    ("args", "parallel"),
    [
        ({"name": "Mixtral"}, {"shard": "nothing"}),
        pytest.param({"name": "Mixtral"}, {"data": 4, "shard": "gradients"}, marks=pytest.mark.sweep),
        pytest.param({"name": "Mixtral"}, {"data": 4, "shard": "parameters"}, marks=pytest.mark.sweep),
        pytest.param({"name": "Qwen3Moe"}, {"shard": "optimizer"}, marks=pytest.mark.sweep),
        ({"name": "DeepseekV3"}, {"shard": "parameters"}),
        ({"name": "Olmoe"}, {"shard": "optimizer"}),
    ],
)
def test_training_is_that_of_one_process(tmp_path: Path, args: dict[str, Any], parallel: dict[str, Any]) -> None:
    """Losses of steps of several microbatches, whose gradients are clipped by a norm that counts each expert once."""
    alone = losses(tmp_path, "alone", args, {"data": 1}, backend="single")
    split = losses(tmp_path, "split", args, {"expert": 2, **parallel}, backend="deepspeed")
    assert split == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("deepspeed", {"expert": 2, "shard": "parameters"}), ("native", {"expert": 2, "shard": "nothing"})),
        pytest.param(
            ("native", {"expert": 2, "shard": "parameters"}),
            ("deepspeed", {"expert": 2, "shard": "optimizer"}),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            ("deepspeed", {"expert": 2, "shard": "nothing"}),
            ("deepspeed", {"data": 4, "expert": 2, "shard": "parameters"}),
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_state_moves(tmp_path: Path, first: tuple[str, dict[str, Any]], then: tuple[str, dict[str, Any]]) -> None:
    """A strategy goes on from what AutoEP has saved, and AutoEP from another's, with the losses of one process."""
    save = {"checkpoint": {"every": 2}}
    three = {"steps": 3, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.5}
    alone = losses(tmp_path, "alone", {"name": "DeepseekV3"}, {"data": 1}, backend="single")
    losses(tmp_path, "first", {"name": "DeepseekV3"}, first[1], backend=first[0], **save, train={**three, "steps": 2})
    saved = str(tmp_path / "first/checkpoints/step-00000002")
    again = losses(tmp_path, "then", {"name": "DeepseekV3"}, then[1], backend=then[0], resume=saved)
    assert again[-1:] == pytest.approx(alone[-1:], rel=3e-6)


def test_experts_follow_autocast(tmp_path: Path) -> None:
    """Losses under bf16-mixed are those of native: experts multiply in bf16, gate and up in one product."""
    train = {"steps": 2, "precision": "bf16-mixed", "optimizer": {"name": "adamw", "lr": 1e-2}}
    native = losses(tmp_path, "native", {"auxiliary": False}, {"expert": 2}, backend="native", train=train)
    split = losses(tmp_path, "split", {"auxiliary": False}, {"expert": 2}, backend="deepspeed", train=train)
    assert split == pytest.approx(native, rel=1e-6)


class ToldAtOnce(OfTransformers):
    """A mixture, of which ranks tell one another in each forward how many tokens they have sent."""

    @override
    def model(self) -> nn.Module:
        token_counts.AT_ONCE = 1  # pyright: ignore[reportConstantRedefinition]
        return super().model()


@pytest.mark.parametrize("task", [f"{TASKS}:OfTransformers", f"{Path(__file__)}:ToldAtOnce"])
def test_tokens_of_experts(tmp_path: Path, task: str) -> None:
    """In the first step they are those of native, by expert, rank and microbatch."""
    more: dict[str, Any] = {"train": {"steps": 1}, "batch": {"total": 16, "micro": 2}}
    more["task"] = {"use": task, "args": {"auxiliary": False}}
    runs = (
        config_of(tmp_path, backend, {}, {"expert": 2}, backend=backend, **more) for backend in ("native", "deepspeed")
    )
    native, autoep = (unipar.launch(config, quiet=True).experts for config in runs)
    ((_, layers),) = autoep
    assert list(layers) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert [sum(layer["tokens"]) for layer in layers.values()] == [16 * 12 * 2] * 2
    assert {1.0} != {layer["microbatch"] for layer in layers.values()}
    assert autoep == native


class Fewer(OfTransformers):
    """A mixture, whose tokens AutoEP is told to send to one expert each."""

    @override
    def model(self) -> nn.Module:
        section = expert_parallel.ExpertSplit.section

        def other(self: ExpertSplit, prefix: str) -> dict[str, Any]:
            return section(self, prefix) | {"top_k": 1}

        expert_parallel.ExpertSplit.section = other
        return super().model()


def test_a_layer_that_computes_something_else(tmp_path: Path) -> None:
    """The proof before the first step sees experts that AutoEP takes in another way than the model."""
    with pytest.raises(TaskError, match=r"^split as planned, the model is another: a loss of "):
        losses(tmp_path, "split", {}, {"expert": 2}, backend="deepspeed", task={"use": f"{Path(__file__)}:Fewer"})
