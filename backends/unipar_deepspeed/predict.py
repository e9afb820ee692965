"""Closed forms of what ZeRO holds in a step."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.backend.prediction.terms import predict_whole, refuse_unplanned
from unipar.backend.prediction.timeline import Prediction, StepTimeline, Term
from unipar.config import Config

LARGEST_REDUCTION = 500_000_000
"""Elements after which ZeRO 0 begins another sum of gradients; nothing sets it."""


def predict_zero(config: Config, timeline: StepTimeline, ranks: int) -> Prediction:
    """Return what a rank of DeepSpeed holds; raise Unsupported for stages without closed forms."""
    shard = config.parallel.shard
    refuse_unplanned(f"deepspeed/{shard}", config, *([f"deepspeed/{shard}"] if shard != "nothing" else ()))
    return Prediction((*predict_whole(timeline, buckets=False), *_reductions(timeline, ranks)))


def _reductions(timeline: StepTimeline, ranks: int) -> Iterator[Term]:
    """Yield the largest copy of gradients that ZeRO 0 sums up, one after another, when the backward is over."""
    if ranks == 1:
        return
    largest = number = 0
    for p in timeline.parameters:
        if p.trained:
            number += p.numel
            largest = max(largest, number * p.element_size)
            number = 0 if number > LARGEST_REDUCTION else number
    yield Term("communication", "gradients, flat", largest, timeline.at("backward", "finish"), timeline.at("update"))
