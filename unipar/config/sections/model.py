"""What a config says about the model itself: where it begins, what its blocks are, what is done to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unipar.config.section import Section


class Compile(Section):
    what: Literal["auto", "blocks", "model"] = "auto"
    """Each block, or the model; auto: blocks, or the model where it has none."""

    backend: str = "inductor"
    """torch.compile's backend."""


class Weights(Section):
    file: str
    """`.safetensors`, or what torch.save wrote (`.pt`, `.pth`, `.bin`); relative to this file."""

    only: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*",)
    """The names to load, `*` allowed: ["body.*"]; the others stay as they were born."""

    strict: bool = True
    """Refuse a file that lacks one of these names, or has one that the model lacks; false: take what fits."""


class Model(Section):
    weights: str | Weights | None = None
    """A file with weights to begin from, or {file: ..., only: [...], strict: false}."""

    blocks: Literal["auto", "none"] | Annotated[tuple[str, ...], Field(strict=False)] = "auto"
    """The repeated blocks, split one by one where parameters are split. auto: found by themselves;
    none: the model as one; or their names, `*` allowed: ["layers.*"]."""

    recompute: Literal["none", "blocks", "selective"] = "none"
    """What the backward pass computes again instead of keeping it: whole blocks, or all in them but matrix products
    and attention."""

    compile: bool | Literal["blocks", "model"] | Compile = False
    """torch.compile on each block, or on the model; true: blocks, or the model where it has none."""

    sync_batchnorm: bool = False
    """BatchNorm by the statistics of one microbatch on all ranks together, instead of on each."""

    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What waits in the host's memory while the device does not need it; parameters: the optimizer's states too."""

    @property
    def compiling(self) -> Compile | None:
        """What to compile and by whom, if anything."""
        if self.compile is False:
            return None
        if self.compile is True:
            return Compile()
        return Compile(what=self.compile) if isinstance(self.compile, str) else self.compile

    @property
    def loading(self) -> Weights | None:
        return Weights(file=self.weights) if isinstance(self.weights, str) else self.weights
