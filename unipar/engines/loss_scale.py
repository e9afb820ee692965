"""Dynamic loss scale for fp16: keeps small gradients above the smallest fp16 number, and divides them afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Loss scale that adapts to the global norm of gradients: equal on all ranks, so it needs no communication.

    The scale and the number of finite steps stay on the device, so that the host waits for neither.
    """

    def __init__(self, device: torch.device, patience: int = GROWTH_INTERVAL_STEPS) -> None:
        self.scale = torch.full((), FIRST_LOSS_SCALE, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._patience = patience

    def counters(self) -> dict[str, float]:
        """Return the scale, and the number of finite steps since it changed; raise NonFinite if no scale is left."""
        self.check()
        return {"loss_scale": float(self.scale), "finite_steps": int(self._finite_steps)}

    def restore_counters(self, saved: Mapping[str, float]) -> None:
        """Go on with the scale of another run."""
        self.scale.fill_(float(saved["loss_scale"]))
        self._finite_steps.fill_(int(saved["finite_steps"]))

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Divide gradients by the loss scale, in place."""
        inverse = self.scale.reciprocal()  # a power of two: exact
        for device in {grad.device for grad in grads}:
            here = [grad for grad in grads if grad.device == device]
            factor = inverse.item() if inverse.is_cpu else inverse.to(device)  # a scale on the host is a number
            torch._foreach_mul_(here, factor)  # pyright: ignore[reportPrivateUsage]

    def overflow(self, norm: Tensor) -> Tensor:
        """Return whether this step must be skipped, on the scale's device, and set the scale for the next one.

        A scale below the smallest becomes 0, with which no later step is finite: weights stay until the host looks.
        """
        skipped = norm.isfinite().logical_not_().to(self.scale.device)
        torch._amp_update_scale_(  # pyright: ignore[reportPrivateUsage]
            self.scale, self._finite_steps, skipped.float(), GROWTH, BACK_OFF, self._patience
        )
        self.scale.masked_fill_(self.scale < SMALLEST_LOSS_SCALE, 0.0)
        return skipped

    def check(self) -> None:
        """Raise NonFinite if gradients have overflowed at each scale; the host waits for the device."""
        if not self.scale:
            raise NonFinite(
                f"gradients are not finite at any loss scale down to {SMALLEST_LOSS_SCALE:g}: look at the loss, the "
                "rate (train.optimizer.lr) and the clip (train.clip), or use bf16-mixed"
            )
