"""Config sections of the optimizers adam and adamw."""

from __future__ import annotations

from typing import Literal

from unipar.config.sections.optimizer_settings import MomentSettings


class Adam(MomentSettings):
    """Config section `train.optimizer` with name: adam."""

    implementation = "torch.optim:Adam"

    name: Literal["adam"] = "adam"
    """Adam; its weight decay is added to the gradient."""


class AdamW(MomentSettings):
    """Config section `train.optimizer` with name: adamw."""

    implementation = "torch.optim:AdamW"
    decoupled = True

    name: Literal["adamw"] = "adamw"
    """Adam with weight decay that is separate from the gradient."""
