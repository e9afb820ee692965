"""Dynamic loss scale for fp16: keeps small gradients above the smallest fp16 number, and divides them afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from unipar.errors import NonFinite

FIRST_LOSS_SCALE, GROWTH, BACK_OFF, GROWTH_INTERVAL_STEPS = 2.0**16, 2.0, 0.5, 2000
"""First scale, factor after that many finite steps, factor after an overflow: the defaults of torch's GradScaler."""

SMALLEST_LOSS_SCALE = 2.0**-10
"""Scale below which training ends with an error."""


@final
class LossScaler:
    """Loss scale that adapts to the global norm of gradients: equal on all ranks, so it needs no communication."""

    def __init__(self, patience: int = GROWTH_INTERVAL_STEPS) -> None:
        self.scale, self.good, self.patience = FIRST_LOSS_SCALE, 0, patience

    def counters(self) -> dict[str, float]:
        """Return the scale, and the number of finite steps since it changed."""
        return {"loss_scale": self.scale, "finite_steps": self.good}

    def restore_counters(self, saved: Mapping[str, float]) -> None:
        """Go on with the scale of another run."""
        self.scale, self.good = float(saved["loss_scale"]), int(saved["finite_steps"])

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide gradients by the loss scale, in place."""
        if grads:
            torch._foreach_mul_(grads, 1.0 / self.scale)  # pyright: ignore[reportPrivateUsage] - a power of two: exact

    def overflowed(self, norm: Tensor) -> bool:
        """Return whether this step must be skipped, and set the scale for the next one."""
        if norm.isfinite().item():
            self.good += 1
            if self.good == self.patience:
                self.scale, self.good = self.scale * GROWTH, 0
            return False
        self.scale, self.good = self.scale * BACK_OFF, 0
        if self.scale < SMALLEST_LOSS_SCALE:
            raise NonFinite(
                f"gradients are not finite at any loss scale down to {SMALLEST_LOSS_SCALE:g}: look at the loss, the "
                "rate (train.optimizer.lr) and the clip (train.clip), or use bf16-mixed"
            )
        return True
