"""Plans of tensor parallelism, derived by trying a block on meta tensors: no process group, no values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from typing_extensions import override
from unipar_mesh.tensor.block_calls import describe_difference_of_calls, kind_of_call
from unipar_mesh.tensor.cuts import BlockPlan, Cut, ParameterCut, Rewrite, cut_parameters, linear_part
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.tensor_model import calls_of_blocks, derive_model_plan
from unipar_mesh.tensor.tensor_plan import Expected, derive_block_plan, plan_other_call, rehearse
from unipar_mesh.tensor.tensor_trial import WHOLE, CannotCut, Trial

from tests.support.tensor_blocks import WIDTH, Called, NanoBlock, library_blocks, own_blocks
from unipar.backend import Region
from unipar.errors import TaskError

COLUMN, ROW, FUSED = Cut("column"), Cut("row"), Cut("column", 3)
ATTENTION = {f"self_attn.{n}_proj": COLUMN for n in "qkv"} | {"self_attn.o_proj": ROW}
GATED = {"mlp.gate_proj": COLUMN, "mlp.up_proj": COLUMN, "mlp.down_proj": ROW}
T5 = {**{f"SelfAttention.{n}": COLUMN for n in "qkv"}, "SelfAttention.o": ROW}
T5_MLP = {"DenseReluDense.wi": COLUMN, "DenseReluDense.wo": ROW}


def inside(name: str, cuts: dict[str, Cut]) -> dict[str, Cut]:
    return {f"{name}.{n}": cut for n, cut in cuts.items()}


PLANS: dict[str, dict[str, Cut]] = {
    "char_gpt": {"qkv": FUSED, "out": ROW, "mlp.0": COLUMN, "mlp.2": ROW},
    "nanogpt": {"c_attn": FUSED, "c_proj": ROW, "c_fc": COLUMN, "proj": ROW},
    "nanogpt slow": {"c_attn": FUSED, "c_proj": ROW, "c_fc": COLUMN, "proj": ROW},
    "odd": dict.fromkeys(("zork", "blip", "frob", "x1", "x2"), COLUMN) | {"quux": ROW, "x3": ROW},
    "unequal": {"qkv": Cut("column", 3, (32, 16, 16)), "o": ROW, "gu": Cut("column", 2), "down": ROW},
    "timm": {"qkv": FUSED, "proj": ROW, "mlp.0": COLUMN, "mlp.3": ROW},
    "torch": {"self_attn": FUSED, "self_attn.out_proj": ROW, "linear1": COLUMN, "linear2": ROW},
    "gpt2": {"attn.c_attn": FUSED, "attn.c_proj": ROW, "mlp.c_fc": COLUMN, "mlp.c_proj": ROW},
    "llama": ATTENTION | GATED,
    "qwen3": ATTENTION | GATED,
    "bert": {f"attention.self.{n}": COLUMN for n in ("query", "key", "value")}
    | {"attention.output.dense": ROW, "intermediate.dense": COLUMN, "output.dense": ROW},
    "t5 encoder 0": inside("layer.0", T5) | inside("layer.1", T5_MLP),
    "t5 decoder 1": inside("layer.0", T5)
    | {n.replace("layer.0.Self", "layer.1.EncDec"): c for n, c in inside("layer.0", T5).items()}
    | inside("layer.2", T5_MLP),
}


@pytest.fixture(scope="module")
def blocks() -> dict[str, Called]:
    return own_blocks(0.1) | library_blocks(0.1)


@pytest.mark.parametrize("name", PLANS)
def test_plan_of_a_block(name: str, blocks: dict[str, Called]) -> None:
    """Columns, rows, and the groups of fused projections; no process group is made for it."""
    plan = derive_block_plan(*blocks[name], 2)
    assert dict(plan.cuts) == PLANS[name]
    assert not dist.is_initialized()


def kinds(plan: BlockPlan) -> set[str]:
    return {rewrite.kind for rewrites in plan.sites.values() for rewrite in rewrites}


def test_calls_that_are_rewritten() -> None:
    """Sizes are divided only where a block spells them out; a Llama without dropout runs without any mode."""
    assert kinds(derive_block_plan(*library_blocks()["llama"], 2)) == set()
    assert kinds(derive_block_plan(*own_blocks()["nanogpt"], 2)) == {"pieces", "sizes", "dropout"}
    assert kinds(derive_block_plan(*own_blocks(0.1)["nanogpt"], 2)) == {
        "pieces",
        "sizes",
        "dropout",
        "dropout attention",
    }
    assert kinds(derive_block_plan(*own_blocks()["odd"], 2)) == {"sizes", "part"}


def test_heads_that_do_not_divide() -> None:
    """Attention stays whole with the numbers in the reason, and the MLP is cut."""
    plan = derive_block_plan(*own_blocks(heads=1)["char_gpt"], 2)
    assert dict(plan.cuts) == {"mlp.0": COLUMN, "mlp.2": ROW}
    qkv, out = plan.whole["qkv"], plan.whole["out"]
    assert qkv == "2 does not divide the 1 heads of scaled_dot_product_attention at char_gpt.py:31"
    assert out == "layer_norm at char_gpt.py:33 needs it whole"
    plan = derive_block_plan(*own_blocks()["unequal"], 4)
    assert dict(plan.cuts) == {"gu": Cut("column", 2), "down": ROW}
    reason = re.sub(r"py:\d+", "py", plan.whole["qkv"])
    assert reason == "4 does not divide the 2 heads or parts that view at tensor_blocks.py makes of its output"
    plan = derive_block_plan(*own_blocks(heads=1)["torch"], 2)
    assert plan.whole == {"self_attn": "2 does not divide its 1 heads"}


class Narrow(nn.Module):
    """A block with one matrix of another kind, and one that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.table = nn.Embedding(4, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.odd(x)
        return x + self.down(F.relu(self.up(x))) + self.table.weight[0]


def test_what_stays_whole_has_a_reason() -> None:
    """Every matrix is either cut or whole with a sentence."""
    plan = derive_block_plan(Narrow(), (torch.randn(2, 8),), {}, 2)
    assert dict(plan.cuts) == {"up": COLUMN, "down": ROW}
    assert plan.whole == {
        "odd": "2 does not divide its 3 outputs",
        "table.weight": "it is not the weight of a linear layer",
    }


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) if x.sum() > 0 else x


def test_a_block_that_asks_for_values() -> None:
    """Such a block stays whole, and the reason is what torch says."""
    plan = derive_block_plan(Asking(), (torch.randn(2, 8),), {}, 2)
    assert plan.cuts == {}
    assert set(plan.whole) == {"up", "down"}
    assert plan.whole["up"].startswith("the block does not run on meta tensors: RuntimeError: Tensor.item()")


class Branching(nn.Module):
    """A block that goes another way with a scale, and yet another with a word."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    @override
    def forward(self, x: Tensor, scale: Tensor | None = None, way: str = "") -> Tensor:
        y = self.up(x)
        if scale is not None:
            y = y * scale
        return self.down(y.softmax(-1) if way else y)


def test_calls_in_another_way() -> None:
    """A call of another kind than the planned one is tried with the same cuts; where that cannot be, it is refused."""
    block, x, scale = Branching(), torch.randn(2, 8), torch.ones(16)
    plan = derive_block_plan(block, (x,), {}, 2)
    assert plan.sites == {}
    calls = calls_of_blocks(nn.ModuleList([block, block]), {"0": plan, "1": plan})
    assert calls["0"] is calls["1"]
    sites_of = calls["0"]
    assert sites_of((torch.randn(5, 8),), {}) is plan.sites
    with torch.no_grad():
        sites = sites_of((x, scale), {})
    assert sites_of((x, scale * 2), {}) is sites
    assert [r for rewrites in sites.values() for r in rewrites] == [Rewrite("part", arguments=(((1,), 0),))]
    with pytest.raises(TaskError) as e:
        sites_of((x,), {"way": "softmax"})
    line = re.sub(r"py:\d+", "py", str(e.value))
    assert line == (
        "parallel.tensor: 2 splits 0 as it was called on the first microbatch, and now way is softmax and was not "
        "given: softmax at test_tensor_plan.py needs it whole. Call it alike for every batch, keep these matrices "
        "whole in the task's tensor(model), or leave tensor out"
    )


def test_kinds_of_calls() -> None:
    """Sizes do not matter, but for dimensions of one element; the words tell every argument that differs."""
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 1, 5, 5).bool()
    before = kind_of_call((x, None), {"tables": (x, x), "cached": False, "cache": {"k": x}})
    assert before == kind_of_call((torch.randn(3, 9, 8), None), {"cache": {"k": x}, "tables": (x, x), "cached": False})
    now = kind_of_call((x, mask), {"tables": (x, x[:, :1]), "cached": True, "plan": Cut("row")})
    assert describe_difference_of_calls(before, now) == (
        "argument 2 is a mask of (n, 1, n, n) and was None, cache is not given and was {k: a tensor of (n, n, n)}, "
        "cached is True and was False, tables is (a tensor of (n, n, n), a tensor of (n, 1, n)) and was "
        "(a tensor of (n, n, n), a tensor of (n, n, n)), plan is Cut and was not given"
    )


def test_a_plan_for_another_call_is_found_wrong() -> None:
    """Keys that two heads share are whole, and repeated for both if there is a mask: a rank then takes its own."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, **heads)
    model: Any = transformers.LlamaModel(config)
    found: list[tuple[Any, Any]] = []

    def keep(block: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))

    handle = model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    ids = torch.zeros(2, 5).long()
    model(ids, use_cache=False)
    model(ids, use_cache=False, attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]))
    handle.remove()
    (args, kwargs), (_, masked) = found
    block = model.layers[0]
    plan = derive_block_plan(block, args, kwargs, 2)
    other = plan_other_call(block, args, masked, plan)
    parts = [
        [r.arguments for rewrites in p.sites.values() for r in rewrites if r.kind == "part"] for p in (plan, other)
    ]
    assert parts == [[(((1,), None), ((2,), None))], [(((1,), -3), ((2,), -3))]]
    trial = Trial(meta_block(block), 2, ways_of(plan), training=True)
    trial.run(*meta_arguments(args, masked))
    expected = Expected(trial.shapes, trial.blame, trial.lines)
    rehearse(block, other, meta_arguments(args, masked), expected, training=True)
    with pytest.raises(CannotCut, match=r"^scaled_dot_product_attention at .* gives \(2, 2, 5, 16\) for \(2, 1, 5"):
        rehearse(block, plan, meta_arguments(args, masked), expected, training=True)


def ways_of(plan: BlockPlan) -> dict[str, tuple[int, ...]]:
    """Return the ways of a trial in which these matrices stay whole."""
    return dict.fromkeys(plan.whole, WHOLE)


def test_the_task_wins() -> None:
    """Patterns keep matrices whole; a kind that cannot be, or that does not exist, is refused."""
    called = own_blocks()["char_gpt"]
    plan = derive_block_plan(*called, 2, {"mlp.*": "whole"})
    assert dict(plan.cuts) == {"qkv": FUSED, "out": ROW}
    assert plan.whole == {"mlp.0": "the task's tensor() says so", "mlp.2": "the task's tensor() says so"}
    assert derive_block_plan(*called, 2, {"mlp.0": "column", "out": "row"}).cuts == PLANS["char_gpt"]
    with pytest.raises(TaskError) as e:
        derive_block_plan(*called, 2, {"mlp.0": "rows"})
    assert str(e.value) == "tensor() says 'rows' for 'mlp.0'; return one of column, row, whole"
    with pytest.raises(TaskError) as e:
        derive_block_plan(*called, 2, {"mlp.0": "row"})
    assert (
        str(e.value)
        == "tensor() says row for mlp.0, which cannot be: a row needs an input that is cut; leave mlp.0 out of it"
    )
    with pytest.raises(TaskError) as e:
        derive_block_plan(*own_blocks(heads=1)["char_gpt"], 2, {"qkv": "column"})
    assert str(e.value) == (
        "tensor() says column for qkv, which cannot be: "
        "2 does not divide the 1 heads of scaled_dot_product_attention at char_gpt.py:31; leave qkv out of it"
    )


def test_parts_and_regions() -> None:
    """A rank's part and its regions hold the same elements, each of the whole once over the ranks."""
    for cut, dim in ((COLUMN, 0), (ROW, 1), (FUSED, 0), (Cut("column", 3, (8, 2, 2)), 0), (Cut("row", 2), 1)):
        whole = torch.arange(12 * 8).reshape(12, 8)
        parameter = ParameterCut((12, 8), dim, cut, 2)
        times = torch.zeros(12 * 8)
        for rank in range(2):
            part = parameter.local(whole, rank)
            assert part.is_contiguous()
            assert tuple(part.shape) == parameter.local_shape()
            rows = part.shape[0]
            for first, count in ((0, rows // 2), (rows // 2, rows - rows // 2)):  # as FSDP2 splits it
                for region, own in parameter.regions(rank, first, count):
                    assert_close(region.of(whole).flatten(), part[own].flatten(), rtol=0, atol=0)
                    times[region.of(whole).flatten()] += 1
        assert times.tolist() == [1.0] * 96
    assert FUSED.spans(12, 1, 2) == [(2, 2), (6, 2), (10, 2)]
    assert ParameterCut((12, 8), 0, COLUMN, 2).regions(1) == [(Region(48, 48), (slice(0, 6),))]


def test_parameters_that_are_cut() -> None:
    """Weights and biases of columns, weights of rows; transformers' GPT-2 has its input first."""
    blocks = library_blocks() | own_blocks()
    block, args, kwargs = blocks["gpt2"]
    found = cut_parameters(block, derive_block_plan(block, args, kwargs, 2))
    assert {name: (cut.dim, cut.local_shape()) for name, cut in found.items() if "attn" in name} == {
        "attn.c_attn.weight": (1, (32, 48)),
        "attn.c_attn.bias": (0, (48,)),
        "attn.c_proj.weight": (0, (16, 32)),
    }
    block, args, kwargs = blocks["torch"]
    found = cut_parameters(block, derive_block_plan(block, args, kwargs, 2))
    assert {name: cut.local_shape() for name, cut in found.items() if "attn" in name} == {
        "self_attn.in_proj_weight": (48, 32),
        "self_attn.in_proj_bias": (48,),
        "self_attn.out_proj.weight": (32, 16),
    }
    whole = torch.arange(12.0).reshape(6, 2)
    part = linear_part(FUSED, "weight", whole, transposed=False, rank=1, ranks=2)
    assert part.tolist() == [[2.0, 3.0], [6.0, 7.0], [10.0, 11.0]]
    bias = linear_part(ROW, "bias", whole[:, 0], transposed=False, rank=1, ranks=2)
    assert bias.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


class Stack(nn.Module):
    def __init__(self, heads: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList(NanoBlock(h) for h in heads)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_equal_blocks_are_tried_once() -> None:
    """One plan for each kind of block; nothing runs behind the last kind; the model is as before."""
    model = Stack((4, 4, 4))
    before = {name: (p.device.type, id(p)) for name, p in model.named_parameters()}
    plan = derive_model_plan(model, [f"layers.{i}" for i in range(3)], lambda m, b: m(b), torch.zeros(2, 5).long(), 2)
    assert plan.tried == ("layers.0",)
    assert plan.blocks["layers.2"] is plan.blocks["layers.0"]
    assert plan.sentences() == ["layers.0 and 2 more: columns c_attn, c_fc; rows c_proj, proj"]
    assert {name: (p.device.type, id(p)) for name, p in model.named_parameters()} == before
    odd = Stack((4, 4))
    odd.layers[1].proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)
    given = {"layers.*.c_fc": "whole"}
    plan = derive_model_plan(odd, ["layers.0", "layers.1"], lambda m, b: m(b), torch.zeros(2, 5).long(), 2, given)
    assert plan.tried == ("layers.0", "layers.1")
    assert [set(plan.blocks[name].cuts) for name in plan.tried] == [{"c_attn", "c_proj"}] * 2
    with pytest.raises(TaskError) as e:
        derive_model_plan(odd, ["layers.0"], _embedded, torch.zeros(2, 5).long(), 2)
    assert str(e.value) == "parallel.tensor: the loss does not call layers.0, one of the model's blocks"


def _embedded(model: Any, ids: Any) -> Tensor:
    return model.table(ids).sum()


PUBLISHED: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "Llama": {},
    "Qwen2": {},
    "Gemma": {},
    "Phi3": {
        "mlp.down_proj": ("rowwise_split_input", "row"),
        "mlp.gate_up_proj": ("colwise_gather_output", "column"),
        "self_attn.o_proj": ("rowwise_split_input", "row"),
        "self_attn.qkv_proj": ("colwise_gather_output", "column"),
    },
}
"""Differences from transformers' own plan: its kind, and ours. Where it cuts a fused projection it gathers the output
and splits it again, since its cut mixes queries, keys and values; a cut in groups needs neither."""


def published(model: Any) -> dict[str, str]:
    plan: dict[str, str] = model.config.base_model_tp_plan
    return {pattern.removeprefix("layers.*."): kind for pattern, kind in plan.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_by_hand(name: str) -> None:
    """The plan of a model with the published sizes (Llama: 7B), beside the one that transformers has for it."""
    made: Any = getattr(transformers, f"{name}ForCausalLM")
    with torch.device("meta"):
        model = made(getattr(transformers, f"{name}Config")(use_cache=False))
    layers = [f"model.layers.{i}" for i in range(model.config.num_hidden_layers)]
    batch = torch.zeros(2, 16, dtype=torch.long)
    plan = derive_model_plan(model, layers, lambda m, b: m(input_ids=b, labels=b).loss, batch, 2)
    assert plan.tried == ("model.layers.0",)
    ours = {n: cut.kind for n, cut in plan.blocks["model.layers.0"].cuts.items()}
    theirs = published(model)
    same = {"colwise": "column", "rowwise": "row"}
    both = {n: (theirs.get(n), ours.get(n)) for n in sorted(theirs.keys() | ours.keys())}
    assert {n: (a, b) for n, (a, b) in both.items() if same.get(a or "") != b} == PUBLISHED[name]
    if name == "Llama":
        assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
        assert plan.seconds < 20  # about 0.3 on an idle core
