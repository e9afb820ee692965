"""`Muon`: momentum that is made orthogonal by Newton-Schulz steps, by the formulas of torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from unipar.optimizers.matrix_optimizer import MatrixOptimizer


@final
class Muon(MatrixOptimizer):
    """Muon for matrices and AdamW for other parameters, in one optimizer."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        ns_eps: float = 1e-7,
        ns_precision: str = "full",
        adjust_lr: str = "match_rms_adamw",
        **adamw: Any,
    ) -> None:
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr": adjust_lr}
        own |= {"ns_coefficients": tuple(ns_coefficients), "ns_eps": ns_eps, "ns_precision": ns_precision}
        super().__init__(params, {**adamw, **own})

    @override
    def direction(self, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        momentum = group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average: Tensor = state["momentum_buffer"].lerp_(gradient, 1.0 - momentum)
        update = gradient.lerp(average, momentum) if group["nesterov"] else average
        dtype = torch.bfloat16 if group["ns_precision"] == "bf16" else torch.promote_types(update.dtype, torch.float32)
        orthogonal = orthogonalize(
            update.to(dtype), group["ns_coefficients"], steps=group["ns_steps"], eps=group["ns_eps"]
        )
        return orthogonal.to(gradient.dtype).mul_(rate_factor(group["adjust_lr"], *gradient.shape))


def orthogonalize(matrix: Tensor, coefficients: Sequence[float], *, steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors, whose singular values are near 1, by Newton-Schulz steps."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T.contiguous() if tall else x


def rate_factor(rule: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's rate: for updates as large as AdamW's, or for equal ones in each output."""
    return 0.2 * sqrt(max(rows, columns)) if rule == "match_rms_adamw" else sqrt(max(1.0, rows / columns))
