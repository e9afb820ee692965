"""Config section of the optimizer sgd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from unipar.config.sections.optimizer_settings import Accumulation, KernelSettings


class SGD(KernelSettings):
    """Config section `train.optimizer` with name: sgd."""

    implementation = "torch.optim:SGD"
    fused_if_split = False

    name: Literal["sgd"] = "sgd"
    """Stochastic gradient descent."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the previous step that is added to each step."""

    nesterov: bool = False
    """Whether to use Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum, which is 0; give one (momentum: 0.9)")
        return self

    @property
    @override
    def gradient_sums(self) -> Mapping[str, Accumulation]:
        if self.momentum:
            return {"momentum_buffer": Accumulation(self.momentum, 1.0, begins_whole=True)}
        return {"weight": Accumulation(1.0, 0.0)}

    @property
    @override
    def states(self) -> int:
        return int(self.momentum > 0)
