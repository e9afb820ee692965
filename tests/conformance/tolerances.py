"""How far a strategy's numbers may be from those of one process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Largest differences of the loss (absolute), norm (relative) and parameters (absolute; None: not promised)."""

    loss: float
    norm: float
    params: float | None


CHAIN = Tolerance(2e-6, 1e-5, 2e-5)
OWN_NORMS = Tolerance(2e-6, 1e9, 2e-5)
NARROW_MOMENTS = Tolerance(5e-6, 1e-4, 3e-3)
"""A sum that rounds otherwise may turn a moment into its neighbour: several percent in 8 bits, 1/256 in bf16."""
GPT2 = Tolerance(2e-6, 1e-6, 5e-5)
"""Its larger first weights make larger roundings; greedy generation is equal all the same."""

FP32, FP64, BF16 = Tolerance(2e-6, 1e-6, 2e-5), Tolerance(1e-13, 1e-13, 1e-12), Tolerance(5e-3, 2e-2, None)
