"""Sentences for what interleaved and zerobubble, which are torch's schedules, cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.backend.refusals import Refusals, conditions_of, refusals_met
from unipar.config import Config

_REFUSALS: Refusals = {
    "torch's": {"context": ("", "take schedule 1f1b or gpipe")},
    "zerobubble": {
        "expert": (
            "it averages gradients over all ranks of the data at once, and ranks along expert hold different experts",
            "take another schedule",
        ),
        "model.recompute: selective": (
            "it runs two backwards through each block, one for gradients of inputs and one for those of weights, and "
            "torch allows one there",
            "take recompute: blocks",
        ),
        "model.compile": (
            "torch cannot split the backward of what is compiled into gradients of inputs and of weights",
            "leave it out, or take schedule interleaved",
        ),
        "parallel.shard": (
            "it computes gradients of weights apart from the backward in which FSDP2 would reduce them, so that they "
            "would stay empty",
            "take shard nothing, or another schedule",
        ),
    },
}


def refusals_of_torch_schedules(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that interleaved and zerobubble, which are torch's schedules, do not allow."""
    axes = config.parallel.axes
    name = f"parallel.schedule: {axes.schedule}"
    if config.data.last_batch == "keep":
        yield (
            f"{name} needs microbatches of one shape, and data.last_batch: keep makes the last batch of an epoch "
            "smaller: set data.last_batch: drop, or take schedule 1f1b or gpipe"
        )
    if config.batch.tokens is not None:
        yield (
            f"{name} needs microbatches of one shape; those of batch.tokens ({config.batch.tokens}) have any length: "
            "give batch.total, or take schedule 1f1b or gpipe"
        )
        return
    if isinstance(config.parallel.data, int):
        count = config.batch.settle(config.parallel.data).accumulate
        rounds = max(1, count // axes.pipeline)
        if count % rounds:
            yield (
                f"{name} runs the microbatches of a step in equal rounds of {axes.pipeline} or more, one for each rank "
                f"of the pipeline; there are {count}, which are not {rounds} equal rounds: take a multiple of "
                f"{axes.pipeline} (batch.total = data x micro x accumulate), or schedule 1f1b"
            )
    beside = {axis: f"{axis}: {size}" for axis, size in axes.sizes.items() if axis in ("context", "expert")}
    yield from refusals_met(conditions_of(config) | beside | {"torch's": name, axes.schedule: name}, _REFUSALS)
