"""Section options.native of the config."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from unipar.config import Config, Section


class NativeOptions(Section):
    """Section options.native of the config."""

    find_unused: bool | Literal["auto"] = "auto"
    """DDP's search for parameters that the loss does not use. auto: the first step shows whether it is needed;
    true: at every step, for a model that uses other parameters at other times; false: never."""

    bucket_mb: PositiveInt = 25
    """DDP's bucket size in MiB: how much gradient is reduced at once."""

    wrapper: Literal["auto", "dp"] = "auto"
    """auto: DDP or FSDP2, by what is split; dp: nn.DataParallel, one process over all its CUDA devices."""

    vocabulary: Literal["whole", "split"] = "whole"
    """split: under parallel.tensor, embedding and head have a part of the words on each rank, and torch's cross entropy
    adds up over ranks instead of gathering the logits."""

    attention: Literal["auto", "gather", "ring", "torch"] = "auto"
    """How attention reaches other ranks' positions under parallel.context: keys and values gathered, or passed on.
    torch: by torch's own ring attention, on CUDA only; auto: that where it can do it, else gathered."""

    proof: Literal["whole", "blocks", "off"] = "whole"
    """Comparison of a model split over tensor, pipeline or context with the whole one before the first step.
    whole: loss and gradients of the whole model, which rank 0 computes; blocks: its loss, and gradients of a block of
    each kind, where rank 0 cannot hold all gradients; off: nothing, which the log says."""


def options_of(config: Config) -> NativeOptions:
    """Return options.native of the config."""
    return NativeOptions.model_validate(config.options.get("native", {}))
