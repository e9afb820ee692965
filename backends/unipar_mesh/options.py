"""Options of a model that is split over tensor, pipeline or context: part of options.native."""

from __future__ import annotations

from typing import Literal

from unipar.config import Config, Section


class MeshOptions(Section):
    """Options of a model that is split over tensor, pipeline or context."""

    vocabulary: Literal["whole", "split"] = "whole"
    """split: under parallel.tensor, embedding and head have a part of the words on each rank, and torch's cross entropy
    adds up over ranks instead of gathering the logits."""

    attention: Literal["auto", "gather", "ring", "ulysses", "torch"] = "auto"
    """How attention reaches other ranks' positions under parallel.context: keys and values gathered, or passed on.
    ulysses: ranks trade their positions for some of the heads, by two all-to-alls.
    torch: by torch's own ring attention, on CUDA only. auto: that where it can do it, else ulysses if it sends fewer
    bytes than gather, else gather."""

    proof: Literal["whole", "blocks", "off"] = "whole"
    """Comparison of a model split over tensor, pipeline or context with the whole one before the first step.
    whole: loss and gradients of the whole model, which rank 0 computes; blocks: its loss, and gradients of a block of
    each kind, where rank 0 cannot hold all gradients; off: nothing, which the log says."""


def options_of(config: Config) -> MeshOptions:
    """Return the mesh's part of options.native of the config."""
    options = config.options.get("native", {})
    return MeshOptions.model_validate({key: value for key, value in options.items() if key in MeshOptions.model_fields})
