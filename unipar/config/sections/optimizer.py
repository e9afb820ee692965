"""Optimizers, schedules, rate scaling, clipping."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator

from unipar.config.section import Section


class _Optimizer(Section):
    lr: PositiveFloat = 1e-3
    """The base rate; groups of the task may have their own."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of the weights at each step."""

    decay: Literal["all", "matrices"] = "all"
    """matrices: no decay on biases, norms and other parameters of one dimension."""

    fused: bool | Literal["auto"] = "auto"
    """One kernel for all parameters. auto: wherever optimizer, dtype and device have it."""

    foreach: bool | Literal["auto"] = "auto"
    """One call for lists of parameters, where it is not fused. auto: as PyTorch decides."""

    @model_validator(mode="after")
    def _one_kind_of_kernel(self) -> Self:
        if self.fused is True and self.foreach is True:
            raise ValueError("fused: true and foreach: true exclude each other; leave one of them out")
        return self


class SGD(_Optimizer):
    name: Literal["sgd"] = "sgd"
    """Stochastic gradient descent."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the last step that is kept."""

    nesterov: bool = False
    """Look ahead by the momentum."""

    @model_validator(mode="after")
    def _by_some_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true looks ahead by the momentum, which is 0; give one (momentum: 0.9)")
        return self


_Fraction = Annotated[float, Field(ge=0, lt=1)]


class _Moments(_Optimizer):
    betas: Annotated[tuple[_Fraction, _Fraction], Field(strict=False)] = (0.9, 0.999)
    """How long the two moments remember."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class Adam(_Moments):
    name: Literal["adam"] = "adam"
    """Adam; its decay is added to the gradient."""


class AdamW(_Moments):
    name: Literal["adamw"] = "adamw"
    """Adam with decay apart from the gradient."""


def _by_name(default: str) -> Discriminator:
    def which(value: object) -> str:
        name: object = value.get("name", default) if isinstance(value, dict) else getattr(value, "name", default)
        return str(name)

    return Discriminator(which)


Optimizer = Annotated[
    Annotated[SGD, Tag("sgd")] | Annotated[Adam, Tag("adam")] | Annotated[AdamW, Tag("adamw")], _by_name("adamw")
]


def optimizer_arguments(optimizer: Optimizer, device: str, *, split: bool = False) -> dict[str, Any]:
    """Return the arguments of PyTorch's optimizer besides its groups; what PyTorch shall decide is left out.

    `device` is a type ("cpu", "cuda"); `split` says that parameters are split over ranks, as FSDP2 does it.
    """
    made: dict[str, Any] = {"lr": float(optimizer.lr), "weight_decay": float(optimizer.weight_decay)}
    if isinstance(optimizer, SGD):
        made |= {"momentum": float(optimizer.momentum), "nesterov": optimizer.nesterov}
    else:
        made |= {"betas": tuple(float(b) for b in optimizer.betas), "eps": float(optimizer.eps)}
    fused = optimizer.fused
    if fused == "auto":
        missing = split and isinstance(optimizer, SGD)  # PyTorch has no fused SGD for split parameters
        fused = True if optimizer.foreach is not True and device in ("cpu", "cuda") and not missing else None
    if fused:
        return made | {"fused": True}
    if fused is False:
        made["fused"] = False
    return made if optimizer.foreach == "auto" else made | {"foreach": optimizer.foreach}


class LrScale(Section):
    rule: Literal["none", "linear", "sqrt"] = "none"
    """How the rate grows with `batch.total`: by its ratio to `at_batch`, or the root of that ratio."""

    at_batch: PositiveInt | None = None
    """The total batch for which `lr` was chosen."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.rule == "none") != (self.at_batch is None):
            raise ValueError("rule and at_batch go together: {rule: linear, at_batch: 32}, or neither")
        return self

    def factor(self, total: int) -> float:
        if self.at_batch is None:
            return 1.0
        ratio = total / self.at_batch
        return ratio if self.rule == "linear" else ratio**0.5


class _Schedule(Section):
    warmup: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the rate climbs to its full value."""


class Constant(_Schedule):
    name: Literal["constant"] = "constant"
    """The full rate after warm-up."""


class Linear(_Schedule):
    name: Literal["linear"] = "linear"
    """A straight line down to `end` at the last step."""

    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of the rate at the last step."""


class Cosine(_Schedule):
    name: Literal["cosine"] = "cosine"
    """Half a cosine down to `end` at the last step."""

    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of the rate at the last step."""


Schedule = Annotated[
    Annotated[Constant, Tag("constant")] | Annotated[Linear, Tag("linear")] | Annotated[Cosine, Tag("cosine")],
    _by_name("constant"),
]


class Clip(Section):
    max: PositiveFloat
    """The largest norm that the gradient of all parameters together may have."""

    norm: Literal["fp32", "fp64"] = "fp32"
    """What the norm is summed in; fp64 makes backends agree to the bit, and costs time."""
