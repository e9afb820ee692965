"""fp16's loss scale: gradients are computed large enough for the small numbers of that format, and divided again."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from unipar.errors import NonFinite

FIRST_LOSS_SCALE, GROWTH, BACK_OFF, GROWTH_INTERVAL_STEPS = 2.0**16, 2.0, 0.5, 2000
"""Where it begins, what it is multiplied with after so many good steps, and after a bad one: as torch's GradScaler."""

SMALLEST_LOSS_SCALE = 2.0**-10


@final
class LossScaler:
    """Decides by the global norm, which is the same on all ranks: nothing more is sent for it."""

    def __init__(self, patience: int = GROWTH_INTERVAL_STEPS) -> None:
        self.scale, self.good, self.patience = FIRST_LOSS_SCALE, 0, patience

    def unscale(self, grads: list[Tensor]) -> None:
        if grads:
            torch._foreach_mul_(grads, 1.0 / self.scale)  # pyright: ignore[reportPrivateUsage] - a power of two: exact

    def overflowed(self, norm: Tensor) -> bool:
        """Whether this step is to be left out; the scale of the next one follows."""
        if norm.isfinite().item():
            self.good += 1
            if self.good == self.patience:
                self.scale, self.good = self.scale * GROWTH, 0
            return False
        self.scale, self.good = self.scale * BACK_OFF, 0
        if self.scale < SMALLEST_LOSS_SCALE:
            raise NonFinite(
                f"gradients are not finite at any loss scale down to {SMALLEST_LOSS_SCALE:g}: look at the loss, the rate "
                "(train.optimizer.lr) and the clip (train.clip), or use bf16-mixed"
            )
        return True
