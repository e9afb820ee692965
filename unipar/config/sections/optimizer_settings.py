"""`OptimizerSettings`: base class of the config sections of optimizers, with what others ask about an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, model_validator
from typing_extensions import override

from unipar.config.sections.section import Section

BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Accumulation(NamedTuple):
    """Factors by which one kind of state follows from gradients."""

    keeps: float
    """Factor on the old state in an update."""

    adds: float
    """Factor on the gradient in an update."""

    begins_whole: bool = False
    """Whether the first gradient is the first state, without a factor."""


class MatrixChoice(NamedTuple):
    """Choice of the matrices that an optimizer updates as a whole."""

    patterns: Literal["auto"] | list[str]
    """Patterns of their names."""

    left_out: list[str]
    """Patterns of names of weights that are not among them."""

    rest: Mapping[str, float]
    """Settings that all other parameters have, unless their group has its own."""


class OptimizerSettings(Section):
    """Base class of an optimizer's config section: others ask for its traits, never for its name or class."""

    implementation: ClassVar[str]
    """Class that updates parameters, as module:name. It is imported when an optimizer is made."""

    package: ClassVar[str] = ""
    """Package that it needs beside torch; unipar has an extra of the same name."""

    decoupled: ClassVar[bool] = False
    """Whether weight decay shrinks weights; otherwise it is added to the gradient."""

    whole_matrices: ClassVar[bool] = False
    """Whether it updates each matrix as a whole, on one rank."""

    moments_in_bf16: ClassVar[bool] = False
    """Whether moments are in bf16 between steps, rounded by chance, for which it gets a seed and parameters' names."""

    moments_in_blocks: ClassVar[bool] = False
    """Whether moments are codes, and a scale for each block of elements."""

    moment_bytes: ClassVar[int | None] = None
    """Bytes of an element of its states; None: those of the weight that is updated."""

    full_moments: ClassVar[type[OptimizerSettings] | None] = None
    """Optimizer with the same update whose moments have as many bits as weights; None if this one's have."""

    lr: PositiveFloat = 1e-3
    """Base learning rate; parameter groups of the task may have their own."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of the weights at each step."""

    decay: Literal["all", "matrices", "transformers"] = "all"
    """Parameters that decay. matrices: not biases, norms and other parameters of one dimension; transformers: as its
    Trainer, all but those of LayerNorm and those with bias or norm in their name."""

    @property
    def gradient_sums(self) -> Mapping[str, Accumulation]:
        """Kinds of state that accumulate gradients, of which a parameter has one; weight, if there is no state; none
        at all if no sum of gradients can be computed from what it keeps."""
        return {}

    @property
    def states(self) -> int:
        """States with an element for each of a parameter's; at most, if parameters differ."""
        return 2

    def matrix_choice(self) -> MatrixChoice | None:
        """Return which matrices it updates as a whole; None if it updates every element by itself."""
        return None

    def arguments(self, device: str, *, split: bool = False) -> dict[str, Any]:
        """Return the arguments of the class other than its groups, without those that PyTorch decides itself.

        `device` is a type ("cpu", "cuda"); `split` says that parameters are split over ranks as in FSDP2.
        """
        rates = {"lr": float(self.lr), "weight_decay": float(self.weight_decay)}
        return {**rates, **self.own_arguments(), **self.kernel_arguments(device, split=split)}

    def own_arguments(self) -> dict[str, Any]:
        """Return the arguments that this optimizer has beside rate, decay and kernels: its own fields."""
        own = [key for key in type(self).model_fields if key not in ("name", *KernelSettings.model_fields)]
        return {key: getattr(self, key) for key in own}

    def kernel_arguments(self, device: str, *, split: bool) -> dict[str, bool]:
        """Return the arguments that choose kernels."""
        return {}


class KernelSettings(OptimizerSettings):
    """Base class of sections of optimizers that have fused kernels."""

    fused_if_split: ClassVar[bool] = True
    """Whether PyTorch has a fused kernel for parameters that are split over ranks."""

    fused: bool | Literal["auto"] = "auto"
    """One kernel for all parameters. auto: if optimizer, dtype and device support it."""

    foreach: bool | Literal["auto"] = "auto"
    """One call for lists of parameters, if not fused. auto: PyTorch decides."""

    @model_validator(mode="after")
    def _one_kind_of_kernel(self) -> Self:
        if self.fused is True and self.foreach is True:
            raise ValueError("fused: true and foreach: true exclude each other; leave one of them out")
        return self

    @override
    def kernel_arguments(self, device: str, *, split: bool) -> dict[str, bool]:
        fused = None if self.fused == "auto" else self.fused
        if self.fused == "auto" and self.foreach is not True and device in ("cpu", "cuda"):
            fused = True if self.fused_if_split or not split else None
        if fused:
            return {"fused": True}
        foreach = {} if self.foreach == "auto" else {"foreach": self.foreach}
        return foreach if fused is None else {"fused": False, **foreach}


class MomentSettings(KernelSettings):
    """Base class of sections of Adam and what is like it."""

    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: PositiveFloat = 1e-8
    """Number that is added to the root of the second moment."""

    @property
    @override
    def gradient_sums(self) -> Mapping[str, Accumulation]:
        return first_moment(self.betas)


def first_moment(betas: tuple[float, float]) -> Mapping[str, Accumulation]:
    """Return how Adam's first moment accumulates gradients."""
    return {"exp_avg": Accumulation(betas[0], 1.0 - betas[0])}
