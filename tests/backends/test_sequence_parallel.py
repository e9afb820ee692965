"""Blocks whose hidden states are cut along the sequence as well: results, gradients, masks; and what is refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from typing_extensions import override
from unipar_mesh.options import MeshOptions
from unipar_mesh.prediction.split_for_plan import split_model
from unipar_mesh.sequence import sequence_collectives as collectives
from unipar_mesh.sequence.sequence_collectives import GatheredInput, Span
from unipar_mesh.sequence.sequence_plan import add_sequence
from unipar_mesh.tensor.tensor_plan import derive_block_plan

from examples.char_gpt import Block
from tests.support.tensor_blocks import WIDTH, own_blocks
from tests.support.tensor_worlds import NEAR, said_in_world
from unipar.backend import Part
from unipar.config import Config
from unipar.errors import TaskError
from unipar.model.transforms import apply_transforms

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # torch's own, while it is imported


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "own"),
        pytest.param(2, "sdpa", marks=pytest.mark.sweep),
        pytest.param(2, "eager", marks=pytest.mark.sweep),
        pytest.param(4, "own", marks=pytest.mark.sweep),
    ],
)
def test_parts_of_a_sequence_compute_the_whole(ranks: int, kind: str, tmp_path: Path) -> None:
    """As with whole sequences, on lengths that the ranks divide, and on 5 positions, of which the last rank has less
    or none."""
    (tmp_path / "sequence").touch()
    for said in said_in_world(tmp_path, ranks, kind):
        refused = {name for name, values in said.items() if "refused" in values}
        assert refused == ({"lora"} if kind == "own" else set())
        off = {
            f"{name}: {way}": value
            for name, values in said.items()
            for way, value in values.items()
            if way not in ("cuts", "refused") and (value is False or (value is not True and value > NEAR))
        }
        assert off == {}


class Mixing(nn.Module):
    """Adds up over positions between its matrices."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(8, 16), nn.Linear(16, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        match self.way:
            case "in place":
                return x.cumsum_(1)
            case "cumsum":
                return x.cumsum(1)
            case "first":
                return x - x[:, :1]
            case "flat":
                return F.normalize(x.view(-1, 8)).view(x.shape)
            case "noise":
                return x + torch.randn_like(x)
            case _:
                return x.mean(1)


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("cumsum", "cumsum"),
        ("first", "__getitem__"),
        ("flat", "view"),
        ("noise", "randn_like"),
        ("mean", "mean"),
    ],
)
def test_a_call_that_needs_all_positions(way: str, calls: str) -> None:
    """Such a call gets them gathered, and explain can name it with its line."""
    block, x = Mixing(way), torch.randn(2, 6, 8)
    plan = add_sequence("layers.0", block, (x,), {}, derive_block_plan(block, (x,), {}, 2))
    found: Any = plan.sequence
    assert set(plan.cuts) == {"up", "down"}
    assert [call.partition(" at test_sequence_parallel.py:")[0] for call in found.joined] == [calls]


def test_a_block_that_changes_parts_in_place() -> None:
    """The sentence names the call, its line, and the way out."""
    block, x = Mixing("in place"), torch.randn(2, 6, 8)
    plan = derive_block_plan(block, (x,), {}, 2)
    with pytest.raises(TaskError) as refused:
        add_sequence("layers.0", block, (x,), {}, plan)
    says = str(refused.value)
    assert says.startswith(
        "parallel.sequence: true splits what goes through layers.0 along its dimension 1, and cumsum_ at "
        "test_sequence_parallel.py:"
    )
    assert says.endswith(" needs it whole and changes it in place: leave sequence out (parallel.sequence: false)")


def test_the_plan_says_what_is_gathered() -> None:
    """Columns gather the sequence, rows give it back cut; what stays whole has its gradient added up."""
    block, args, kwargs = own_blocks()["char_gpt"]
    plan = add_sequence("x", block, args, kwargs, derive_block_plan(block, args, kwargs, 2))
    found: Any = plan.sequence
    assert (found.dim, found.gathered, found.scattered) == (1, {"qkv": (-2,), "mlp.0": (-2,)}, {"out": -2, "mlp.2": -2})
    assert (found.on_parts, found.outputs) == ((), (0,))
    added_up = {
        key.split("|")[0]: [way for way, dim in rewrite.arguments if dim is None]
        for key, rewrites in plan.sites.items()
        for rewrite in rewrites
        if rewrite.sequence and rewrite.kind == "part"
    }
    assert added_up == {"norm1": [("weight",), ("bias",)], "norm2": [("weight",), ("bias",)]}


def test_parts_of_any_length() -> None:
    """Parts are equally long, and the last ones shorter, or empty."""
    counts = [[Span(length, 4, rank, None).count for rank in range(4)] for length in (8, 9, 5, 3, 1)]
    assert counts == [[2, 2, 2, 2], [3, 3, 3, 0], [2, 2, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


def test_hooks_around_see_all_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the input and what else the product keeps, not the whole, which is gathered again."""

    def gathered(part: Tensor, dim: int, span: Span) -> Tensor:
        return torch.cat([part, part], dim)

    def added(grad: Tensor, dim: int, span: Span) -> Tensor:
        return grad.narrow(dim, 0, 2) + grad.narrow(dim, 2, 2)

    def unpack(packed: tuple[Tensor]) -> Tensor:
        return packed[0]

    def product(whole: Tensor) -> Tensor:
        return F.linear(whole, weight * 2.0)

    monkeypatch.setattr(collectives, "gather_parts", gathered)
    monkeypatch.setattr(collectives, "add_parts", added)
    part, weight = torch.randn(2, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    group: Any = object()
    kept: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> tuple[Tensor]:
        kept.append(tuple(x.shape))
        return (x.clone(),)

    with saved_tensors_hooks(pack, unpack):
        given = GatheredInput(part, 0, Span(4, 2, 0, group), keep=False)
        out = given.use(product)
    assert sorted(kept) == [(2, 3), (3, 5)]  # the part and the weight, and not the whole
    out.square().sum().backward()
    whole = torch.cat([part, part]).detach().requires_grad_()
    plain = F.linear(whole, weight.detach() * 2.0)
    (expected,) = torch.autograd.grad(plain.square().sum(), whole)
    assert torch.allclose(part.grad, expected[:2] + expected[2:])  # pyright: ignore[reportArgumentType]


def test_recomputed_blocks_under_hooks_of_saved_tensors() -> None:
    """Such hooks get plain tensors: a block still knows that its input is a part, and no gathered input is left."""
    model, x = nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4)), torch.randn(1, 6, WIDTH)
    split = {"data": 1, "tensor": 2, "sequence": True}
    config = Config.model_validate(
        {
            "task": {"use": "x:Y"},
            "batch": {"total": 1},
            "train": {"steps": 1, "optimizer": {"lr": 1.0}},
            "parallel": split,
            "model": {"recompute": "blocks"},
        }
    )
    apply_transforms(model, ["0", "1"], config)
    part = Part("model", model, lambda _: None, ["0", "1"], loss=lambda m, batch: m(batch), sample=lambda: x)  # pyright: ignore[reportArgumentType]
    (mine,) = split_model(part, config, MeshOptions())
    with mine.placed(), mine.armed():
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            out = model(x)
        out.part.sum().backward()
    assert [t for t in gc.get_objects() if isinstance(t, GatheredInput)] == []
