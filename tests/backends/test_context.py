"""Sequences cut over ranks: numbers of one process on 2 and 4 ranks, and sentences for what cannot be cut."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from unipar_mesh.context.block_arguments import position_dimension
from unipar_mesh.context.kernels import attend, attend_backward
from unipar_mesh.context.sequence_layout import SequenceLayout

from tests.support.context_inside import CASES, OF_FOUR
from tests.support.forks import Forks
from tests.support.world import ROOT
from unipar.errors import TaskError
from unipar.launcher.processes.group import WorkerGroup

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # torch's own, while it is imported


MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "vit")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[int, dict[str, Any]]:
    """What came out of each case, by the size of the world; all ranks of a world say the same of refusals."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    forks.plain.import_modules(MODELS)  # once, and not in each of six ranks
    found: dict[int, dict[str, Any]] = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        entry, environment = "tests.support.context_inside:run", {"PYTHONPATH": path}
        with WorkerGroup(folder, ranks, entry, environment=environment) as workers:
            workers.wait()
        found[ranks] = json.loads((folder / "said-0.json").read_text("utf-8"))
    return found


EXACT = [name for name in CASES if not name.startswith("refused") and "bf16" not in name and name != "bytes"]


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_give_the_numbers_of_one_process(said: dict[int, dict[str, Any]], name: str) -> None:
    """Loss, gradients of all parameters, and the random numbers that come next."""
    off = said[2][name]
    assert off["loss"] < 1e-12
    assert off["gradient"] < 1e-12
    assert off["random"] == 0.0


@pytest.mark.parametrize("name", [name for name in OF_FOUR if name in EXACT])
def test_four_ranks_give_the_numbers_of_one_process(said: dict[int, dict[str, Any]], name: str) -> None:
    off = said[4][name]
    assert off["loss"] < 1e-12
    assert off["gradient"] < 1e-12
    assert off["random"] == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "char gpt, bf16",
        "llama, mask, bf16",
        "char gpt, bf16, ring",
        "char gpt, bf16, ulysses",
        "char gpt, bf16, torch's ring",
    ],
)
def test_autocast_differs_by_rounding_only(said: dict[int, dict[str, Any]], name: str) -> None:
    off = said[2][name]
    assert off["loss"] < 2e-3
    assert off["gradient"] < 2e-2


POSITIONS = (
    "parallel.context: blocks.0 counts positions by itself (equal inputs give other results at other places), and on a "
    "rank it would count those of its part, 12 of 24: compute what depends on positions before the blocks and pass it "
    "to them (rotary tables, position_ids)"
)
MIXES = (
    "parallel.context: blocks.0 mixes positions outside of scaled_dot_product_attention, and a rank has 12 of 24: "
    "compute attention by torch's scaled_dot_product_attention (transformers: "
    'attn_implementation="sdpa"), or split by parallel.tensor or parallel.pipeline instead'
)


REFUSALS = [
    (
        "eager",
        "parallel.context: transformer.h.0 does not run on 12 positions, a rank's part (The size of tensor a (12) "
        "must match the size of tensor b (24) at non-singleton dimension 3): attention must be torch's "
        'scaled_dot_product_attention (transformers: attn_implementation="sdpa"), and what goes along the sequence '
        "an argument of the block",
    ),
    ("positions", POSITIONS),
    ("shift", MIXES),
    ("products", MIXES),
    (
        "own mask",
        "parallel.context: blocks.0 makes a mask of 12 columns from its own 12 of 24 positions: pass "
        "is_causal=True to scaled_dot_product_attention, or make the mask before the blocks and pass it to them",
    ),
    (
        "noise",
        "parallel.context: blocks.0 draws random numbers for its positions (randn_like); each rank would draw "
        "others than one process does: use dropout, or draw them before the blocks",
    ),
    (
        "image",
        "parallel.context: blocks.0 gets hidden states of shape (3, 1, 24, 1); only those of shape (batch, "
        "sequence, width) can be cut along the sequence",
    ),
    (
        "sequence first",
        "parallel.context: blocks.0 calls attention with queries of shape (1, 4, 24, 4), where (batch, heads, 1, "
        "width) was expected: its hidden states must be (batch, sequence, width), and attention must go along the "
        "sequence",
    ),
    (
        "padding of torch's layers",
        "parallel.context: blocks.0 calls torch.nn.MultiheadAttention with a mask, which that checks against this "
        "rank's part: pass is_causal=True, and no padding mask",
    ),
    (
        "as many samples as positions",
        "parallel.context: position_embeddings of model.layers.0 has the shape (24, 24, 4), and with 24 samples of "
        "24 positions and a width of 16 that can mean several things, so it is not known what to cut over "
        "ranks: take another batch.micro or length, or make the tensor inside the block",
    ),
    (
        "too short",
        "parallel.context: a sequence of 1 cannot be cut over 2 ranks: leave out sequences shorter than that, or "
        "take fewer ranks",
    ),
    (
        "a block left out",
        "parallel.context: layers.1 came where layers.0 was due: between the first block and the last, the loss "
        "must call each block once, in order",
    ),
    (
        "a block twice",
        "parallel.context: layers.0 came where layers.1 was due: between the first block and the last, the loss "
        "must call each block once, in order",
    ),
    (
        "no blocks",
        "parallel.context: 2 cuts sequences between the first block and the last, and the model has no blocks: "
        "name them in model.blocks or in the task's blocks()",
    ),
    (
        "own recomputing",
        "parallel.context: transformer.h.0 recomputes its forward by itself (gradient_checkpointing), where its "
        "attention would see this rank's part only: leave that out, and set model.recompute: blocks",
    ),
    (
        "torch's ring, a mask",
        "options.native.attention: torch cannot do the attention of model.layers.0: there is a mask, and torch's ring "
        "takes is_causal alone; leave the option out, and keys and values are gathered where torch's ring cannot do it",
    ),
    (
        "torch's ring, dropout",
        "options.native.attention: torch cannot do the attention of transformer.h.0: there is dropout (0.1), which "
        "torch's ring would draw for each part by itself; leave the option out, and keys and values are gathered "
        "where torch's ring cannot do it",
    ),
    (
        "torch's ring, parts that differ",
        "options.native.attention: torch cannot do the attention of layers.0: torch's ring needs equal parts, and "
        "2 x 2 does not divide the sequence of 29; leave the option out, and keys and values are gathered where "
        "torch's ring cannot do it",
    ),
    (
        "ulysses, one head",
        "options.native.attention: ulysses cannot do the attention of blocks.0: 1 head of queries cannot be divided "
        "evenly among 2 ranks of parallel.context; say gather or ring",
    ),
    (
        "ulysses, few positions",
        "options.native.attention: ulysses cannot tell whether a mask of blocks.0 has one row for all of 3 positions, "
        "where one of 2 ranks has one position: take longer sequences, or say gather or ring",
    ),
    (
        "compiled",
        "parallel.context: layers.1 is compiled, and compiled attention cannot be cut over ranks: leave "
        "model.compile out",
    ),
]
"""Models that cannot be cut, and the sentences that say so."""


@pytest.mark.parametrize(("name", "sentence"), REFUSALS)
def test_what_cannot_be_cut_is_refused(said: dict[int, dict[str, Any]], name: str, sentence: str) -> None:
    assert said[2][f"refused: {name}"] == sentence


def test_every_refusal_is_read() -> None:
    """A case that is played, and whose sentence no test compares, proves nothing."""
    assert {f"refused: {name}" for name, _ in REFUSALS} == {name for name in CASES if name.startswith("refused")}


def test_a_rank_keeps_its_part_and_sends_keys_and_values(said: dict[int, dict[str, Any]]) -> None:
    """2 samples of 512 positions, width 16, two blocks: activations are divided, and no mask of all pairs is made.

    Keys and values of a rank are 2 x 512 / C x 32 x 4 bytes = 128 KiB / C a block; behind the last it sends half of it.
    """
    two, four = said[2]["bytes"], said[4]["bytes"]
    for way in ("gather", "ring"):
        assert two[f"{way}: kept"] == two["whole: kept"] // 2
        assert four[f"{way}: kept"] == two["whole: kept"] // 4
        assert two[f"{way}: forward"] == 2 * 65536 + 32768
        assert four[f"{way}: forward"] == 3 * (2 * 32768 + 16384)
    assert two["gather: backward"] == 2 * 2 * 65536 + 32768  # keys and values again, then their gradients
    assert four["gather: backward"] == 3 * (2 * 2 * 32768 + 16384)
    assert two["ring: backward"] == 2 * (65536 + 2 * 65536) + 32768  # gradients go one step further, home
    assert four["ring: backward"] == 2 * (3 * 32768 + 4 * 32768) + 3 * 16384


def test_ranks_that_trade_positions_for_heads_send_less_the_more_they_are(said: dict[int, dict[str, Any]]) -> None:
    """Queries, keys, values and results of a rank are 2 x 512 / C x 64 x 4 bytes a block, of which it sends no 1 / C.

    Results are kept twice: by heads for attention's backward, by positions for that of what follows.
    """
    two, four = said[2]["bytes"], said[4]["bytes"]
    assert two["ulysses: kept"] == two["whole: kept"] // 2 + 2 * 32768
    assert four["ulysses: kept"] == two["whole: kept"] // 4 + 2 * 16384
    assert two["ulysses: forward"] == two["ulysses: backward"] == 2 * 65536 + 32768
    assert four["ulysses: forward"] == four["ulysses: backward"] == 3 * (2 * 16384 + 16384)


def test_causal_work_is_even() -> None:
    """Rank r of C has parts r and 2C-1-r: the pairs of positions that it computes are nearly as many on each rank."""
    layouts = [SequenceLayout(1000, 4, rank) for rank in range(4)]
    assert layouts[0].spans(0) == (range(125), range(875, 1000))
    assert layouts[0].spans(3) == (range(375, 500), range(500, 625))
    pairs = [sum(int(p) + 1 for p in layout.positions(torch.device("cpu"))) for layout in layouts]
    assert pairs == [125125, 125125, 125125, 125125]


@pytest.mark.parametrize(("length", "ranks"), [(2, 2), (7, 2), (24, 2), (29, 4), (5, 4)])
def test_every_position_is_on_one_rank(length: int, ranks: int) -> None:
    """Lengths that 2C does not divide give parts that differ by one position at most."""
    layout = SequenceLayout(length, ranks, 0)
    parts = [layout.positions(torch.device("cpu"), rank).tolist() for rank in range(ranks)]
    assert sorted(p for part in parts for p in part) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)


def _dimension(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, name: str = "value") -> int | None:
    """Return what is cut of a tensor beside hidden states of 3 samples, 24 positions and a width of 16."""
    layout = SequenceLayout(24, 2, 0)
    return position_dimension(torch.empty(shape, dtype=dtype), torch.empty(3, 24, 16), layout, name)


@pytest.mark.parametrize(
    ("shape", "dtype", "cut"),
    [
        ((24,), torch.int64, 0),
        ((1, 24), torch.int64, 1),
        ((3, 24), torch.int64, 1),
        ((3, 24), torch.bool, None),
        ((24, 8), torch.float32, 0),
        ((24, 24), torch.bool, 0),
        ((3, 24, 8), torch.float32, 1),
        ((1, 24, 8), torch.complex64, 1),
        ((3, 24, 24), torch.bool, 1),
        ((4, 24, 24), torch.float32, 1),
        ((12, 1, 24), torch.float32, None),
        ((24, 24, 4), torch.float32, 0),
        ((24, 1, 8), torch.float32, 0),
        ((3, 1, 24, 24), torch.bool, 2),
        ((1, 4, 24, 24), torch.float32, 2),
        ((3, 1, 1, 24), torch.bool, None),
        ((3, 24, 1, 8), torch.float32, 1),
        ((1, 1, 24, 8), torch.float32, 2),
        ((3, 16), torch.float32, None),
        ((3, 7, 16), torch.float32, None),
        ((), torch.float32, None),
        ((64, 8), torch.float32, None),
    ],
)
def test_which_dimension_of_an_argument_is_cut(shape: tuple[int, ...], dtype: torch.dtype, cut: int | None) -> None:
    """Position numbers, rotary tables and rows of masks are cut; masks of keys and other sequences are not."""
    assert _dimension(shape, dtype) == cut


def test_a_mask_of_keys_is_known_by_its_name() -> None:
    assert _dimension((3, 24), name="attention_mask of layers.0") is None


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((3, 24), "that can mean several things"),
        ((3, 16, 24), "none of its dimensions is known to be the sequence"),
        ((2, 2, 2, 24, 8), "none of its dimensions is known to be the sequence"),
    ],
)
def test_a_dimension_that_cannot_be_told_is_refused(shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(TaskError) as refused:
        _dimension(shape, name="gate of layers.0")
    assert str(refused.value) == (
        f"parallel.context: gate of layers.0 has the shape {shape}, and with 3 samples of 24 positions and a width of "
        f"16 {why}, so it is not known what to cut over ranks: take another batch.micro or length, or make the "
        "tensor inside the block"
    )


def test_another_sequence_as_long_as_a_part_is_refused() -> None:
    """Keys of 12 positions could be a rank's 12 of 24, or another sequence's."""
    with pytest.raises(TaskError) as refused:
        _dimension((3, 12, 16), name="encoder_hidden_states of layers.0")
    assert str(refused.value) == (
        "parallel.context: encoder_hidden_states of layers.0 has 12 positions, as many as this rank's part of 24: "
        "whether they are the same is not known; take another length"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_kernels_of_a_gpu_give_what_products_give(dtype: torch.dtype, allowed: float, causal: bool) -> None:
    """Kernels are called with their log-sum-exp, forward and backward, as merging parts needs it."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 4, 37, 16, device="cuda") for _ in range(4))
    found: list[list[Tensor]] = []
    for kind in (torch.float64, dtype):
        a, b, c = (t.to(kind) for t in (q, k, v))
        out, lse = attend(a, b, c, None, causal, 0.25)
        found.append([out, lse, *attend_backward(gradient.to(kind), a, b, c, out, lse, None, causal, 0.25)])
    exact, fast = found
    for mine, whole in zip(fast, exact, strict=True):
        assert float((mine.double() - whole).abs().max()) < allowed * float(whole.abs().max())
