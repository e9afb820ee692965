"""AdamW with moments in bf16: what it draws, that it is right on average, that pieces and layouts change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.bf16_moments import Bf16ByHand, bits_by_hand
from unipar.model.saved_size import saved_bytes
from unipar.optimizers.adamw_bf16 import AdamWBf16
from unipar.optimizers.stochastic_rounding import ElementRuns, draw_bits, round_by_chance

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def _named(model: nn.Module) -> list[dict[str, Any]]:
    names = [name for name, _ in model.named_parameters()]
    return [{"params": list(model.parameters()), "names": names}]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("piece", "fused"), [(2**20, None), (500, None), (500, True)])
def test_numbers_are_those_of_adamw_with_rounded_moments(piece: int, fused: bool | None) -> None:
    """Bit for bit, also some elements at a time; roundings are drawn by hand in another arithmetic."""
    ours, theirs, full = _model(), _model(), _model()
    mine = AdamWBf16(_named(ours), **SETTINGS, fused=fused)
    mine.piece = piece
    _train(ours, mine)
    _train(theirs, Bf16ByHand(theirs, theirs.parameters(), **SETTINGS, fused=fused))
    _train(full, torch.optim.AdamW(full.parameters(), **SETTINGS))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b) if fused is None else torch.allclose(a, b, atol=1e-4)
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), full.parameters(), strict=True))
    assert 1e-5 < apart < 5e-3
    assert {str(s[key].dtype) for s in mine.state.values() for key in ("exp_avg", "exp_avg_sq")} == {"torch.bfloat16"}


def test_a_small_change_arrives_on_average() -> None:
    """4,096 second moments fall by a thousandth in each of 100 steps; rounded to the nearest none would."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBf16([p], lr=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    state: dict[str, Any] = optimizer.state[p]
    state["exp_avg_sq"].fill_(1.0)
    p.grad.zero_()
    for _ in range(100):
        optimizer.step()
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(0.999**100, rel=1e-3)
    assert (torch.tensor(1.0) * 0.999).to(torch.bfloat16) == 1.0


def test_bits_are_drawn_by_place_step_and_name() -> None:
    """As by hand, and even: neither half of a number, nor the next element, step or name tells of another."""
    places = torch.arange(20_000, dtype=torch.int32)

    def drawn(step: float, about: str = "0 w") -> Tensor:
        return draw_bits(places, torch.tensor(step), about)

    mine = drawn(3.0)
    assert [int(bits) % 2**32 for bits in mine[:100]] == [int(bits) for bits in bits_by_hand("w", 100, 3)]
    low, high = mine & 0xFFFF, (mine >> 16) & 0xFFFF
    assert float(low.double().mean()) == pytest.approx(32767.5, rel=0.02)
    for other in (high, low.roll(1), drawn(4.0) & 0xFFFF, drawn(3.0, "0 v") & 0xFFFF, drawn(3.0, "1 w") & 0xFFFF):
        assert abs(float(torch.corrcoef(torch.stack([low.double(), other.double()]))[0, 1])) < 0.03


def test_places_of_elements() -> None:
    """Places in a range, in some columns of a matrix, and beyond what an int32 holds."""
    assert ElementRuns(7, 5).numbers(1, 4, CPU).tolist() == [8, 9, 10]
    whole = torch.arange(24).view(4, 6)
    assert ElementRuns(8, 3, 6, 2).numbers(0, 6, CPU).tolist() == whole[1:3, 2:5].flatten().tolist()
    assert ElementRuns(8, 3, 6, 2).numbers(2, 5, CPU).tolist() == whole[1:3, 2:5].flatten()[2:5].tolist()
    assert ElementRuns(2**31 - 1, 2).numbers(0, 2, CPU).tolist() == [2**31 - 1, -(2**31)]


def test_rounding_by_chance() -> None:
    """Numbers that bf16 has stay, others go to a neighbour by the bits, away from zero the larger they are."""
    gap = 2.0**-7
    numbers = torch.tensor([1.5, 1 + gap / 4, 1 + gap / 4, -1 - gap / 4, -1 - gap / 4, float("inf"), float("nan")])
    bits = torch.tensor([65535, 49151, 49152, 49151, 49152, 65535, 65535], dtype=torch.int32)
    found = round_by_chance(numbers, bits)
    assert found[:5].tolist() == [1.5, 1.0, 1 + gap, -1.0, -1 - gap]
    assert found[5:].isnan().tolist() == [True, True]
    only_ones = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)
    assert bool(round_by_chance(only_ones, torch.tensor([65535], dtype=torch.int32)).isnan())


def test_a_bf16_weight() -> None:
    """Its update is computed in fp32."""
    torch.manual_seed(0)
    start, gradient = torch.randn(16, 16, 4, 4), torch.randn(16, 16, 4, 4)
    narrow = nn.Parameter(start.to(torch.bfloat16))
    narrow.grad = gradient.to(torch.bfloat16)
    AdamWBf16([narrow], lr=0.02).step()
    assert torch.equal(narrow, (start.to(torch.bfloat16).float() - 0.02 * gradient.sign()).to(torch.bfloat16))


def test_bytes_of_a_checkpoint() -> None:
    """Two moments of two bytes for each number, and a step for each parameter."""
    numbers = 2 * 8192 + 128 + 64
    saved = (4 + 2 + 2) * numbers + 4 * 4
    assert saved_bytes(_model(), lambda m: AdamWBf16([p for _, p in m.named_parameters()]), fp64=False) == saved
