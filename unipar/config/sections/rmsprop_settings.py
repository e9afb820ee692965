"""Config section of the optimizer rmsprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveFloat
from typing_extensions import override

from unipar.config.sections.optimizer_settings import Accumulation, BelowOne, OptimizerSettings


class RMSprop(OptimizerSettings):
    """Config section `train.optimizer` with name: rmsprop."""

    implementation = "torch.optim:RMSprop"

    name: Literal["rmsprop"] = "rmsprop"
    """RMSprop by PyTorch; its weight decay is added to the gradient."""

    lr: PositiveFloat = 1e-2
    """Base learning rate; parameter groups of the task may have their own."""

    alpha: BelowOne = 0.99
    """Decay rate of the mean of squared gradients."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of that mean."""

    momentum: BelowOne = 0.0
    """Share of the previous step that is added to each step."""

    centered: bool = False
    """Whether to divide by the gradient's standard deviation: the square of its mean is taken off that of squares."""

    foreach: bool | Literal["auto"] = "auto"
    """One call for lists of parameters. auto: PyTorch decides."""

    @property
    @override
    def gradient_sums(self) -> Mapping[str, Accumulation]:
        # it keeps squares of gradients, and their mean only if it is centered
        return {"grad_avg": Accumulation(self.alpha, 1.0 - self.alpha)} if self.centered else {}

    @property
    @override
    def states(self) -> int:
        return 1 + int(self.momentum > 0) + int(self.centered)

    @override
    def kernel_arguments(self, device: str, *, split: bool) -> dict[str, bool]:
        return {} if self.foreach == "auto" else {"foreach": self.foreach}  # PyTorch has no fused RMSprop
