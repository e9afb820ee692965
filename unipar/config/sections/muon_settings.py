"""Config section of the optimizer muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator
from typing_extensions import override

from unipar.config.sections.optimizer_settings import Accumulation, BelowOne, KernelSettings, MatrixChoice, first_moment
from unipar.config.sections.section import Section


class VectorAdamW(Section):
    """Config section `train.optimizer.adamw`: AdamW beside Muon, for everything that is no matrix."""

    lr: PositiveFloat | None = None
    """Its base learning rate; null: that of the matrices."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Its decay of the weights; null: that of the matrices."""

    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of the second moment."""


class MuonSettings(KernelSettings):
    """Config section `train.optimizer` with name: muon."""

    implementation = "unipar.optimizers.muon:Muon"
    decoupled = True
    whole_matrices = True

    name: Literal["muon"] = "muon"
    """Momentum of each matrix, made orthogonal; AdamW for embeddings, the head, and all that is not a matrix."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Share of the momentum that stays at each step."""

    nesterov: bool = True
    """Whether to use Nesterov momentum."""

    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz steps that make a matrix orthogonal."""

    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] = (3.4445, -4.775, 2.0315)
    """Coefficients of these steps."""

    ns_eps: PositiveFloat = 1e-7
    """Smallest norm by which a matrix is divided before these steps."""

    ns_precision: Literal["full", "bf16"] = "full"
    """Precision of these steps. full: that of the gradients, at least fp32; bf16: faster on a GPU, but its roundings
    make strategies differ in the third digit of an update."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of a matrix's rate by its shape. match_rms_adamw: updates as large as AdamW's, so that both have one rate;
    original: the root of rows by columns, at least 1."""

    matrices: Literal["auto"] | list[str] = "auto"
    """Weights of two dimensions that Muon updates, by patterns of their names. auto: all but those of embeddings, and
    of the last module with such a weight, the head."""

    adamw_for: list[str] = Field(default_factory=list)
    """Further weights that AdamW updates, by patterns of their names."""

    adamw: VectorAdamW = VectorAdamW()
    """Settings of AdamW."""

    @model_validator(mode="after")
    def _two_rates(self) -> Self:
        if self.adjust_lr == "original" and self.adamw.lr is None:
            raise ValueError(
                f"adjust_lr: original needs a rate of its own for AdamW, for which Muon's ({self.lr:g}) is too high: "
                "say adamw: {lr: 3e-4}, or leave adjust_lr out"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum, which is 0; leave momentum out (0.95)")
        return self

    @property
    @override
    def gradient_sums(self) -> Mapping[str, Accumulation]:
        return {"momentum_buffer": Accumulation(self.momentum, 1.0 - self.momentum), **first_moment(self.adamw.betas)}

    @override
    def matrix_choice(self) -> MatrixChoice:
        own = {"lr": self.adamw.lr, "weight_decay": self.adamw.weight_decay}
        rest = {key: float(value) for key, value in own.items() if value is not None}
        return MatrixChoice(self.matrices, self.adamw_for, rest)

    @override
    def own_arguments(self) -> dict[str, Any]:
        own = super().own_arguments()
        del own["matrices"], own["adamw_for"], own["adamw"]
        return {**own, "betas": self.adamw.betas, "eps": self.adamw.eps}
