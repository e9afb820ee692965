"""AdamW with moments of 8 bits: torchao's numbers, in pieces, and blocks that are saved and read anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchao.optim
from torch import nn
from typing_extensions import override

from tests.conformance.inside import CombinedState, combine_pieces
from unipar.backend import Piece, Region
from unipar.engines.block_pieces import restore_blocks, split_blocks, state_holdings
from unipar.engines.state import local_regions
from unipar.model.saved_size import saved_bytes
from unipar.optimizers.adamw_8bit import AdamW8bit
from unipar.optimizers.block_states import block_tensors, blocks_fit

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
BLOCKS: dict[str, Any] = SETTINGS | {"block_size": 64}


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class _Uncompiled(torchao.optim.AdamW8bit):
    @override
    def step(self, closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return super().step(closure)


@pytest.mark.parametrize("piece", [2**20, 512])
def test_numbers_are_torchaos(piece: int) -> None:
    """Bit for bit those of torchao's own class, also where a weight is updated some blocks at a time."""
    ours, theirs, full = _model(), _model(), _model()
    mine = AdamW8bit(ours.parameters(), **BLOCKS)
    mine.piece = piece
    _train(ours, mine)
    _train(theirs, _Uncompiled(theirs.parameters(), **BLOCKS))
    _train(full, torch.optim.AdamW(full.parameters(), **SETTINGS))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), full.parameters(), strict=True))
    assert 1e-5 < apart < 5e-3
    kept = {name: type(mine.state[p]["exp_avg"]).__name__ for name, p in ours.named_parameters()}
    assert kept == {"0.weight": "OptimState8bit", "0.bias": "Tensor", "2.weight": "OptimState8bit", "2.bias": "Tensor"}


def test_bytes_are_codes_scales_and_their_map() -> None:
    """8,192 elements: one byte each, 128 scales and a map of 256 numbers, of either moment; a checkpoint has no map."""
    model: Any = _model()
    _train(model, optimizer := AdamW8bit(model.parameters(), **BLOCKS), steps=1)
    state: dict[str, Any] = optimizer.state[model[0].weight]
    sizes = {h.name: h.tensor.nbytes for key in ("exp_avg", "step") for h in state_holdings("w", key, state[key])}
    assert sizes == {"w.exp_avg codes": 8192, "w.exp_avg scale": 512, "w.exp_avg qmap": 1024, "w.step": 4}
    numbers = 2 * 8192 + 128 + 64
    saved = 4 * numbers + 4 * 4 + 4 * (8192 + 512) + 2 * 4 * (128 + 64)
    assert saved_bytes(model, lambda m: AdamW8bit([p for _, p in m.named_parameters()], **BLOCKS), fp64=False) == saved


def test_states_go_out_and_in() -> None:
    """Codes and scales come back as they were; in full precision the numbers that they stand for; and back again."""
    model = _model()
    _train(model, optimizer := AdamW8bit(model.parameters(), **BLOCKS))
    p: Any = model[0].weight
    state: dict[str, Any] = optimizer.state[p]
    pieces = [
        q
        for key in ("exp_avg", "exp_avg_sq")
        for q in split_blocks(Piece("w", key, (128, 64), Region(0, 8192), state[key]), optimizer)
    ]
    assert [(q.kind, q.shape, q.where.numel, q.tensor.dtype) for q in pieces[:2]] == [
        ("exp_avg codes", (128, 64), 8192, torch.uint8),
        ("exp_avg scale", (128,), 128, torch.float32),
    ]
    listed = [(q.name, q.kind, q.shape, tuple(q.where), q.tensor.flatten()) for q in pieces]
    read = CombinedState(combine_pieces(listed), {(q.name, q.kind): q.shape for q in pieces})
    again, used = restore_blocks(optimizer, read, "w", p, read.kinds("w"), lambda _, t: local_regions(t))
    assert used == {"exp_avg codes", "exp_avg scale", "exp_avg_sq codes", "exp_avg_sq scale"}
    for key in ("exp_avg", "exp_avg_sq"):
        mine, other = block_tensors(state[key]), block_tensors(again[key])
        assert mine is not None
        assert other is not None
        assert torch.equal(mine.codes, other.codes)
        assert torch.equal(mine.scale, other.scale)
    part = nn.Parameter(torch.zeros(10, 10))  # blocks do not fit here: it takes elements 300 to 399 in full
    whole, _ = restore_blocks(optimizer, read, "w", part, read.kinds("w"), lambda _, t: [(Region(300, 100), t)])
    assert torch.equal(whole["exp_avg"].flatten(), state["exp_avg"].dequantize().flatten()[300:400])
    full = {("w", "exp_avg"): state["exp_avg"].dequantize().flatten()}
    back, used = restore_blocks(
        optimizer,
        CombinedState(full, {("w", "exp_avg"): (128, 64)}),
        "w",
        p,
        {"exp_avg"},
        lambda _, t: local_regions(t),
    )
    assert used == {"exp_avg"}
    assert type(back["exp_avg"]) is type(state["exp_avg"])
    assert torch.allclose(back["exp_avg"].dequantize(), state["exp_avg"].dequantize(), rtol=0.02, atol=1e-6)


def test_rows_that_are_whole_blocks() -> None:
    """A parameter is in blocks by the length of its rows alone, whatever rank has them; a vector never is."""
    found = {shape: blocks_fit(torch.zeros(shape), 256) for shape in ((3, 512), (512, 3), (8, 16, 4, 4), (4096,))}
    assert found == {(3, 512): True, (512, 3): False, (8, 16, 4, 4): True, (4096,): False}
    optimizer = AdamW8bit([nn.Parameter(torch.zeros(16, 256))], **SETTINGS)
    copied = AdamW8bit(optimizer.param_groups)
    assert copied.block_size == 256
    assert AdamW8bit(AdamW8bit(_model().parameters(), **BLOCKS).param_groups).block_size == 64


def test_other_blocks_take_the_numbers_of_the_old_ones() -> None:
    """A state that was saved in blocks of 64 goes on in blocks of 16, as near as 8 bits are."""
    model = _model()
    _train(model, optimizer := AdamW8bit(model.parameters(), **BLOCKS))
    p: Any = model[0].weight
    was = optimizer.state[p]["exp_avg"]
    pieces = list(split_blocks(Piece("w", "exp_avg", (128, 64), Region(0, 8192), was), optimizer))
    listed = [(q.name, q.kind, q.shape, tuple(q.where), q.tensor.flatten()) for q in pieces]
    read = CombinedState(combine_pieces(listed), {(q.name, q.kind): q.shape for q in pieces})
    finer = AdamW8bit(model.parameters(), **SETTINGS, block_size=16)
    states, _ = restore_blocks(finer, read, "w", p, read.kinds("w"), lambda _, t: local_regions(t))
    inner = block_tensors(states["exp_avg"])
    assert inner is not None
    assert inner.block == 16
    apart = (states["exp_avg"].dequantize() - was.dequantize()).abs().max()
    assert float(apart) < 0.02 * float(was.dequantize().abs().max())
