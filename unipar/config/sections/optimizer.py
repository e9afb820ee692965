"""Config sections of optimizers, scaling of the learning rate, and clipping."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, Tag, model_validator

from unipar.config.sections.schedule import by_name
from unipar.config.sections.section import Section


class _Rates(Section):
    lr: PositiveFloat = 1e-3
    """Base learning rate; parameter groups of the task may have their own."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of the weights at each step."""

    decay: Literal["all", "matrices", "transformers"] = "all"
    """Parameters that decay. matrices: not biases, norms and other parameters of one dimension; transformers: as its
    Trainer, all but those of LayerNorm and those with bias or norm in their name."""


class _Optimizer(_Rates):
    fused: bool | Literal["auto"] = "auto"
    """One kernel for all parameters. auto: if optimizer, dtype and device support it."""

    foreach: bool | Literal["auto"] = "auto"
    """One call for lists of parameters, if not fused. auto: PyTorch decides."""

    @model_validator(mode="after")
    def _one_kind_of_kernel(self) -> Self:
        if self.fused is True and self.foreach is True:
            raise ValueError("fused: true and foreach: true exclude each other; leave one of them out")
        return self


class SGD(_Optimizer):
    """Config section `train.optimizer` with name: sgd."""

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


_Fraction = Annotated[float, Field(ge=0, lt=1)]


class _Moments(_Optimizer):
    betas: Annotated[tuple[_Fraction, _Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of the second moment."""


class Adam(_Moments):
    """Config section `train.optimizer` with name: adam."""

    name: Literal["adam"] = "adam"
    """Adam; its weight decay is added to the gradient."""


class AdamW(_Moments):
    """Config section `train.optimizer` with name: adamw."""

    name: Literal["adamw"] = "adamw"
    """Adam with weight decay that is separate from the gradient."""


class RMSprop(_Rates):
    """Config section `train.optimizer` with name: rmsprop."""

    name: Literal["rmsprop"] = "rmsprop"
    """RMSprop by PyTorch; its weight decay is added to the gradient."""

    lr: PositiveFloat = 1e-2
    """Base learning rate; parameter groups of the task may have their own."""

    alpha: _Fraction = 0.99
    """Decay rate of the mean of squared gradients."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of that mean."""

    momentum: _Fraction = 0.0
    """Share of the previous step that is added to each step."""

    centered: bool = False
    """Whether to divide by the gradient's standard deviation: the square of its mean is taken off that of squares."""

    foreach: bool | Literal["auto"] = "auto"
    """One call for lists of parameters. auto: PyTorch decides."""


class AdamWBf16Settings(_Moments):
    """Config section `train.optimizer` with name: adamw-bf16."""

    name: Literal["adamw-bf16"] = "adamw-bf16"
    """AdamW whose moments are kept in bf16, rounded up or down by chance, so that they are right on average."""


class AdamW8bitSettings(_Rates):
    """Config section `train.optimizer` with name: adamw-8bit."""

    name: Literal["adamw-8bit"] = "adamw-8bit"
    """AdamW by torchao, whose moments are kept in 8 bits: codes, and a scale for each block of elements."""

    block: Annotated[int, Field(ge=16)] = 256
    """Elements that share a scale: moments of weights whose rows are whole blocks are in 8 bits, others in fp32."""

    betas: Annotated[tuple[_Fraction, _Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of the second moment."""


class VectorAdamW(Section):
    """Config section `train.optimizer.adamw`: AdamW beside Muon, for everything that is no matrix."""

    lr: PositiveFloat | None = None
    """Its base learning rate; null: that of the matrices."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Its decay of the weights; null: that of the matrices."""

    betas: Annotated[tuple[_Fraction, _Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of the second moment."""


class MuonSettings(_Optimizer):
    """Config section `train.optimizer` with name: muon."""

    name: Literal["muon"] = "muon"
    """Momentum of each matrix, made orthogonal; AdamW for embeddings, the head, and what is no matrix."""

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


def optimizer_fields(name: str) -> frozenset[str]:
    """Return the keys of the optimizer of this name; empty if there is none."""
    union, *_ = get_args(Optimizer)
    kinds: list[type[_Optimizer]] = [get_args(kind)[0] for kind in get_args(union)]
    return frozenset(key for kind in kinds if kind.model_fields["name"].default == name for key in kind.model_fields)


_MUON_KEYS = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "ns_eps", "ns_precision", "adjust_lr")


def optimizer_arguments(optimizer: Optimizer, device: str, *, split: bool = False) -> dict[str, Any]:
    """Return the arguments of the optimizer's class other than its groups, without those that PyTorch decides itself.

    `device` is a type ("cpu", "cuda"); `split` says that parameters are split over ranks as in FSDP2.
    """
    arguments: dict[str, Any] = {"lr": float(optimizer.lr), "weight_decay": float(optimizer.weight_decay)}
    if isinstance(optimizer, RMSprop):
        arguments |= {key: float(getattr(optimizer, key)) for key in ("alpha", "eps", "momentum")}
        arguments["centered"] = optimizer.centered
    elif isinstance(optimizer, SGD):
        arguments |= {"momentum": float(optimizer.momentum), "nesterov": optimizer.nesterov}
    elif isinstance(optimizer, MuonSettings):
        arguments |= {key: getattr(optimizer, key) for key in _MUON_KEYS}
        arguments |= {"betas": tuple(float(b) for b in optimizer.adamw.betas), "eps": float(optimizer.adamw.eps)}
    else:
        arguments |= {"betas": tuple(float(b) for b in optimizer.betas), "eps": float(optimizer.eps)}
    if isinstance(optimizer, AdamW8bitSettings):
        return arguments | {"block_size": optimizer.block}  # torchao's update goes parameter by parameter
    fused = None if isinstance(optimizer, RMSprop) else optimizer.fused  # PyTorch has no fused RMSprop
    if fused == "auto":
        missing = split and isinstance(optimizer, SGD)  # PyTorch has no fused SGD for split parameters
        fused = True if optimizer.foreach is not True and device in ("cpu", "cuda") and not missing else None
    if fused:
        return arguments | {"fused": True}
    if fused is False:
        arguments["fused"] = False
    return arguments if optimizer.foreach == "auto" else arguments | {"foreach": optimizer.foreach}


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
