"""Config section `model`: initial weights, blocks, recomputation, compilation, offloading."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from unipar.config.sections.section import Section
from unipar.config.sections.size import Bytes

Offloaded = Literal["optimizer", "parameters", "activations"]


class Compile(Section):
    """Config section `model.compile`."""

    what: Literal["auto", "blocks", "model"] = "auto"
    """blocks: compile each block; model: compile the model as one; auto: blocks if the model has any."""

    backend: str = "inductor"
    """torch.compile's backend."""


class RecomputeFit(Section):
    """Config section `model.recompute`."""

    fit: Bytes
    """Memory of a rank, such as 76GiB: only as many blocks are recomputed, the first ones, as the plan needs for it."""


class Weights(Section):
    """Config section `model.weights`."""

    file: str
    """`.safetensors`, a folder with `model.safetensors.index.json` and its files, or a file of torch.save (`.pt`,
    `.pth`, `.bin`); relative to this file."""

    only: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*",)
    """The names to load, `*` allowed: `["body.*"]`; all other parameters keep their initial values."""

    strict: bool = True
    """Whether to refuse a file that does not have one of these names, or has one that the model does not have; false:
    load the names that both have."""


class Model(Section):
    """Config section `model`."""

    weights: str | Weights | None = None
    """A file or folder with weights to begin from, or {file: ..., only: [...], strict: false}."""

    blocks: Literal["auto", "none"] | Annotated[tuple[str, ...], Field(strict=False)] = "auto"
    """The repeated blocks, split one by one if parameters are split. auto: detected; none: the model is not divided
    into blocks; or their names, `*` allowed: `["layers.*"]`."""

    recompute: (
        Literal["none", "blocks", "selective"] | Annotated[tuple[str, ...], Field(strict=False)] | RecomputeFit
    ) = "none"
    """Activations that the backward pass computes again instead of keeping them. blocks: all in each block; selective:
    all in each block except those of matrix products, convolutions and attention; names of blocks, `*` allowed: all in
    these, `["layers.0", "layers.1"]`; {fit: 76GiB}: all in as many blocks as the plan needs."""

    compile: bool | Literal["blocks", "model"] | Compile = False
    """torch.compile on each block, or on the model; true: blocks if the model has any, else the model."""

    sync_batchnorm: bool = False
    """Whether BatchNorm uses the statistics of a microbatch on all ranks together, instead of on each rank; CUDA
    only."""

    offload: Literal["none"] | Offloaded | Annotated[tuple[Offloaded, ...], Field(strict=False)] = "none"
    """Tensors that are kept in host memory while the device does not need them; CUDA only. optimizer: its states;
    parameters: parameters, gradients and optimizer states; activations: those that autograd saves in the blocks, until
    their backward; or activations beside one of the others: `[parameters, activations]`."""

    @model_validator(mode="after")
    def _one_state(self) -> Self:
        if isinstance(self.offload, tuple) and sorted(self.offload) not in (
            ["activations", "optimizer"],
            ["activations", "parameters"],
        ):
            raise ValueError(
                f"offload: [{', '.join(self.offload)}] is no pair of state and activations: write "
                "[optimizer, activations], [parameters, activations] (parameters has the optimizer's states, too), or "
                "one word"
            )
        return self

    @property
    def offloaded_state(self) -> Literal["none", "optimizer", "parameters"]:
        """State that is kept in host memory."""
        if isinstance(self.offload, tuple):
            return "parameters" if "parameters" in self.offload else "optimizer"
        return "none" if self.offload == "activations" else self.offload

    @property
    def offloads_activations(self) -> bool:
        """Whether what autograd saves in the blocks is kept in host memory until backward."""
        return "activations" in self.offload  # a word, or one of two

    @property
    def recomputes(self) -> Literal["none", "blocks", "selective"]:
        """Kind of recomputation, in all blocks or in some."""
        return self.recompute if isinstance(self.recompute, str) else "blocks"

    @property
    def compiling(self) -> Compile | None:
        """Settings of torch.compile, or None if nothing is compiled."""
        if self.compile is False:
            return None
        if self.compile is True:
            return Compile()
        return Compile(what=self.compile) if isinstance(self.compile, str) else self.compile

    @property
    def loading(self) -> Weights | None:
        """Settings of the weights to load, or None if there are none."""
        return Weights(file=self.weights) if isinstance(self.weights, str) else self.weights
