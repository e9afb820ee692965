"""What an update needs for a moment: the optimizer's own tensors, and gradients in fp64 for their norm."""

from __future__ import annotations

from typing import Any

import pytest

import unipar
from tests.support.short_text import short_text

CONFIG: dict[str, Any] = {"task": short_text(), "device": "cpu", "batch": {"total": 8, "micro": 2}}
EMBEDDING = 96 * 16
"""Elements of the largest parameter."""

LARGEST = 64 * 16
"""Elements of the two largest ones of a block, one behind the other."""

FLAT = 8_128 // 2
"""Elements of the half of all parameters that a rank of ZeRO updates."""


def planned(strategy: str, **train: Any) -> Any:
    ranks = 1 if strategy == "single" else 2
    (row,) = unipar.plan({**CONFIG, "train": {"steps": 1, **train}}, strategies=[strategy], worlds=[ranks]).rows
    return row


def held(row: Any) -> int:
    (update,) = (phase for phase in row.phases if phase.phase == "update")
    return update.held.get("temporaries", 0)


def sent(row: Any) -> int:
    return sum(volume.size for volume in row.sent)


@pytest.mark.parametrize(
    ("strategy", "in_a_loop"),
    [
        ("single", 3 * 4 * LARGEST),
        pytest.param("native/nothing", 3 * 4 * LARGEST, marks=pytest.mark.sweep),
        ("native/parameters", 3 * 4 * LARGEST // 2),
        pytest.param("horovod/nothing", 3 * 4 * LARGEST, marks=pytest.mark.sweep),
        ("deepspeed/nothing", 3 * 4 * LARGEST),
        pytest.param("deepspeed/gradients", 2 * 4 * FLAT + 4 * FLAT, marks=pytest.mark.sweep),
        ("deepspeed/parameters", 2 * 4 * FLAT + 4 * FLAT),
    ],
)
def test_the_optimizers_own_tensors(strategy: str, in_a_loop: int) -> None:
    """Adam's loop has two of the largest tensor, and one of that before; ZeRO's is flat, beside its gradients."""
    assert held(planned(strategy, optimizer={"fused": False})) == in_a_loop
    assert held(planned(strategy, optimizer={"fused": True})) < in_a_loop


@pytest.mark.parametrize(
    ("strategy", "norm", "bytes_sent"),
    [
        pytest.param("single", 16 * EMBEDDING, 0, marks=pytest.mark.sweep),
        ("native/nothing", 16 * EMBEDDING, 0),
        pytest.param("native/optimizer", 16 * EMBEDDING, 0, marks=pytest.mark.sweep),
        ("native/parameters", 16 * EMBEDDING // 2, 8),
        pytest.param("horovod/nothing", 16 * EMBEDDING, 0, marks=pytest.mark.sweep),
        pytest.param("deepspeed/nothing", 16 * EMBEDDING, 0, marks=pytest.mark.sweep),
        ("deepspeed/gradients", 16 * EMBEDDING, 8),
        ("deepspeed/parameters", 4 * FLAT, 8),
    ],
)
def test_a_norm_in_fp64(strategy: str, norm: int, bytes_sent: int) -> None:
    """A gradient in fp64 with its squares: of the largest that a rank has; parts are added up over the ranks."""
    exact = planned(strategy, clip={"max": 1.0, "norm": "fp64"})
    assert held(exact) == norm
    without = planned(strategy)
    per_parameter = 4 * 24 if strategy == "native/parameters" else 0
    assert sent(exact) - sent(without) == bytes_sent - per_parameter
