"""Config section of an optimizer, scaling of the learning rate, and clipping."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import PositiveFloat, PositiveInt, Tag, model_validator

from unipar.config.sections.adam_settings import Adam, AdamW
from unipar.config.sections.adamw_8bit_settings import AdamW8bitSettings
from unipar.config.sections.adamw_bf16_settings import AdamWBf16Settings
from unipar.config.sections.muon_settings import MuonSettings
from unipar.config.sections.optimizer_settings import OptimizerSettings
from unipar.config.sections.rmsprop_settings import RMSprop
from unipar.config.sections.schedule import by_name
from unipar.config.sections.section import Section
from unipar.config.sections.sgd_settings import SGD

Optimizer = Annotated[
    Annotated[SGD, Tag("sgd")]
    | Annotated[Adam, Tag("adam")]
    | Annotated[AdamW, Tag("adamw")]
    | Annotated[RMSprop, Tag("rmsprop")]
    | Annotated[AdamWBf16Settings, Tag("adamw-bf16")]
    | Annotated[AdamW8bitSettings, Tag("adamw-8bit")]
    | Annotated[MuonSettings, Tag("muon")],
    by_name("adamw"),
]

_KINDS: tuple[type[OptimizerSettings], ...] = tuple(get_args(kind)[0] for kind in get_args(get_args(Optimizer)[0]))
OPTIMIZERS = {str(kind.model_fields["name"].default): kind for kind in _KINDS}
"""Config sections of all optimizers, by name."""


class LrScale(Section):
    """Config section `train.lr_scale`."""

    rule: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with `batch.total`: by its ratio to `base_batch_size`, or by the root of that
    ratio."""

    base_batch_size: PositiveInt | None = None
    """The total batch for which `lr` was chosen."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.rule == "none") != (self.base_batch_size is None):
            raise ValueError("rule and base_batch_size go together: {rule: linear, base_batch_size: 32}, or neither")
        return self

    def factor(self, total: int) -> float:
        """Return the factor of the learning rate for a total batch."""
        if self.base_batch_size is None:
            return 1.0
        ratio = total / self.base_batch_size
        return ratio if self.rule == "linear" else ratio**0.5


class Clip(Section):
    """Config section `train.clip`."""

    max: PositiveFloat
    """The largest norm that the gradient of all parameters together may have."""

    norm: Literal["fp32", "fp64"] = "fp32"
    """Precision in which the norm is summed; fp64 makes backends agree bit for bit, and costs time."""
