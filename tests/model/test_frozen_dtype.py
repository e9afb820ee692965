"""Frozen parameters that are narrower than all that is trained: which keep their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.support.running import Line, running
from unipar.model.create import narrow_frozen_parameters

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("trained", "frozen", "wanted", "kept"),
    [
        (FP32, BF16, FP32, True),
        (FP32, FP16, FP32, True),
        (FP64, BF16, FP32, True),
        (BF16, BF16, FP32, False),  # a model that is narrow as a whole
        (FP32, FP32, FP32, False),
        (FP32, FP64, FP32, False),  # wider than the precision
        (FP64, FP32, FP32, False),  # it has the precision's dtype already
        (FP32, BF16, FP64, False),  # by fp64 others are measured
        (FP32, BF16, BF16, False),
    ],
)
def test_which_keep_their_dtype(trained: torch.dtype, frozen: torch.dtype, wanted: torch.dtype, kept: bool) -> None:
    """Frozen ones that are narrower than what is trained and than the precision; never in fp64."""
    base = nn.Linear(2, 2, bias=False, dtype=frozen).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(2, 2, dtype=trained))
    assert [id(p) for p in narrow_frozen_parameters(model, wanted)] == [id(base.weight)] * kept


def test_one_trained_weight_that_is_as_narrow() -> None:
    """Then the author has not set what is frozen apart."""
    model = nn.Sequential(nn.Linear(2, 2, dtype=BF16), nn.Linear(2, 2, dtype=BF16), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert narrow_frozen_parameters(model, FP32) == []


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1, 1, bias=False, dtype=BF16).requires_grad_(False)
        self.added = nn.Linear(1, 1, bias=False)
        self.register_buffer("scale", torch.ones(1, dtype=BF16))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight.to(x.dtype)) + self.added(x)


class _Adapted(Line):
    @override
    def model(self) -> Any:
        return _Base()


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", BF16), ("bf16-mixed", BF16), ("fp64", FP64)])
def test_what_a_run_trains(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    """The frozen weight is as the author made it, the trained one and buffers have the precision's dtype."""
    train = {"steps": 2, "optimizer": {"name": "sgd", "lr": 1e-3}, "precision": precision}
    with running(_Adapted(), tmp_path, train=train) as run:
        run.task.train(run)
        pieces = {piece.name: piece.tensor.dtype for piece in run.pieces() if piece.kind in ("weight", "buffer")}
    wide = FP64 if precision == "fp64" else FP32
    assert pieces == {"base.weight": dtype, "added.weight": wide, "scale": wide}
