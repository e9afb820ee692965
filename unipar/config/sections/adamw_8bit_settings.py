"""Config section of the optimizer adamw-8bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat
from typing_extensions import override

from unipar.config.sections.adam_settings import AdamW
from unipar.config.sections.optimizer_settings import Accumulation, BelowOne, OptimizerSettings, first_moment


class AdamW8bitSettings(OptimizerSettings):
    """Config section `train.optimizer` with name: adamw-8bit."""

    implementation = "unipar.optimizers.adamw_8bit:AdamW8bit"
    package = "torchao"
    decoupled = True
    moments_in_blocks = True
    moment_bytes = 1
    full_moments = AdamW

    name: Literal["adamw-8bit"] = "adamw-8bit"
    """AdamW by torchao, whose moments are kept in 8 bits: codes, and a scale for each block of elements."""

    block: Annotated[int, Field(ge=16)] = 256
    """Elements that share a scale: moments of weights whose rows are whole blocks are in 8 bits, others in fp32."""

    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of the second moment."""

    @property
    @override
    def gradient_sums(self) -> Mapping[str, Accumulation]:
        return first_moment(self.betas)

    @override
    def own_arguments(self) -> dict[str, Any]:
        own = super().own_arguments()
        return {"block_size": own.pop("block"), **own}
