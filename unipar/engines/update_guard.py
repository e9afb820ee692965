"""`UpdateGuard`: leaves out an update whose gradients have a norm that is not finite, before weights change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unipar.config import Config
from unipar.distributed.device import has_own_memory
from unipar.engines.learning_rate import BaseRates
from unipar.engines.loss_scale import LossScaler


def skips_updates(config: Config) -> bool:
    """Return whether a run goes on without an update whose norm is not finite."""
    return config.train.precision == "fp16" or config.train.nonfinite == "skip"


@final
class UpdateGuard:
    """Decision whether an update is left out, equal on all ranks, since the norm is.

    The host waits for the answer if the optimizer cannot leave out a step on the device, and until it has taken one:
    torch's fused SGD leaves the momentum of its first step as it is allocated if that step is left out.
    """

    def __init__(
        self,
        base: Optimizer,
        trained: Sequence[nn.Parameter],
        rates: BaseRates,
        device: torch.device,
        config: Config,
        *,
        waits: bool = False,
    ) -> None:
        """Take the optimizer that updates `trained`; `waits`: let the host wait for each answer."""
        self._base, self._trained, self._rates, self._device, self._waits = base, trained, rates, device, waits
        self._stays = not skips_updates(config)
        """Whether all later updates are left out too, until the host knows that one was."""

        self._left_out: Tensor | None = None
        self._has_updated = False

    def leaves_out(self, norm: Tensor, scaler: LossScaler | None) -> bool | Tensor:
        """Return whether the update is left out, on the device if the optimizer reads it there; set the loss scale."""
        if scaler is None and not self._on_device:
            return not math.isfinite(norm.item())
        left_out = norm.isfinite().logical_not_() if scaler is None else scaler.overflow(norm)
        if self._has_updated and self._optimizer_reads:
            if self._stays:
                left_out = left_out if self._left_out is None else left_out.logical_or_(self._left_out)
                self._left_out = left_out
            base: Any = self._base
            base.found_inf = left_out.float()
            return left_out
        if left_out.item():
            return True
        if not self._has_updated and self._optimizer_reads and self._on_device and not self._stays:
            self._rates.put_on(self._device, self._base)  # the first rate is rounded as all others are
        self._has_updated = True
        return False

    @cached_property
    def _on_device(self) -> bool:
        return has_own_memory(self._device)

    @cached_property
    def _optimizer_reads(self) -> bool:
        """Whether the optimizer reads on the device that its step is to be left out, as torch's fused ones do."""
        here = all(p.device == self._device for p in self._trained)  # not offloaded, nor spread by hand
        return here and not self._waits and getattr(self._base, "_step_supports_amp_scaling", False)
