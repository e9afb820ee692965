"""Optimizers by whole matrices for the conformance suite: a task's own, like Shampoo, and Muon written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

import unipar
from tests.conformance import tasks
from unipar.config import Config


class Preconditioned(unipar.MatrixOptimizer):
    """Gradients between inverse roots of their sums by rows and by columns, whose shapes are not the matrix's."""

    @override
    def direction(self, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        rows, columns = gradient.shape
        if not state:
            state |= {
                "rows": gradient.new_zeros(rows, rows),
                "columns": gradient.new_zeros(columns, columns),
                "count": 0,
            }
        state["count"] += 1
        sums = ((state["rows"], gradient @ gradient.T), (state["columns"], gradient.T @ gradient))
        left, right = (_inverse_root(kept.lerp_(new, 0.1) / (1.0 - 0.9 ** state["count"])) for kept, new in sums)
        return left @ gradient @ right


def _inverse_root(m: Tensor) -> Tensor:
    """Return the inverse fourth root of a symmetric matrix, whose small values are raised."""
    values, vectors = torch.linalg.eigh(m.double())
    return ((vectors * (values + 1e-3).pow(-0.25)) @ vectors.T).to(m.dtype)


class WholeMatrices(tasks.Grouped):
    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return Preconditioned(groups, {"eps": 1e-6})


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the suite's models: what has two dimensions in a block."""
    return [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]


class MuonByHand(torch.optim.Optimizer):
    """Muon as in its paper, in the precision of the weights, with AdamW beside it.

    Each matrix has a rate by its shape. Groups may have rates of their own.
    """

    def __init__(self, config: Config, model: nn.Module, groups: Any) -> None:
        wanted: Any = config.train.optimizer
        told = {"lr": wanted.lr, "weight_decay": wanted.weight_decay}
        super().__init__([told | group for group in groups or [{"params": list(model.parameters())}]], told)
        self._whole = {id(p) for p in matrices_of(model)}
        self._momentum: dict[int, Tensor] = {}
        rest = [{**g, "params": [p for p in g["params"] if id(p) not in self._whole]} for g in self.param_groups]
        self._beside = [torch.optim.AdamW([g], eps=wanted.adamw.eps) if g["params"] else None for g in rest]

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, beside in zip(self.param_groups, self._beside, strict=True):
            if beside is not None:
                beside.param_groups[0]["lr"] = group["lr"]
                beside.step()
            for p in group["params"]:
                if id(p) in self._whole:
                    old = self._momentum.get(id(p), torch.zeros_like(p))
                    self._momentum[id(p)] = new = 0.95 * old + 0.05 * p.grad
                    o = _newton_schulz(0.05 * p.grad + 0.95 * new) * 0.2 * max(p.shape) ** 0.5
                    p.copy_(p - group["lr"] * (group["weight_decay"] * p + o))
        return 0.0


def _newton_schulz(m: Tensor) -> Tensor:
    x = m / m.square().sum().sqrt()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x
