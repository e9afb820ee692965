"""Config section of the optimizer adamw-bf16."""

from __future__ import annotations

from typing import Literal

from unipar.config.sections.adam_settings import AdamW
from unipar.config.sections.optimizer_settings import MomentSettings


class AdamWBf16Settings(MomentSettings):
    """Config section `train.optimizer` with name: adamw-bf16."""

    implementation = "unipar.optimizers.adamw_bf16:AdamWBf16"
    decoupled = True
    moments_in_bf16 = True
    moment_bytes = 2
    full_moments = AdamW

    name: Literal["adamw-bf16"] = "adamw-bf16"
    """AdamW whose moments are kept in bf16, rounded up or down by chance, so that they are right on average."""
