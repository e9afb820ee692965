"""Stage 0: every rank holds all, and gradients are summed when the backward is over."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.prediction.terms import (
    buffer_terms,
    norm_terms,
    predict_whole,
    state_terms,
    update_terms,
    whole_tensors,
)
from unipar.prediction.timeline import Prediction, Term
from unipar_deepspeed.prediction.zero_model import MASTER_BYTES, SentBytes, ZeroModel

LARGEST_REDUCTION = 500_000_000
"""Elements after which another sum of gradients begins; nothing sets it."""


def predict_stage_0(model: ZeroModel) -> Prediction:
    """Return what a rank holds and sends."""
    timeline, sent = model.timeline, SentBytes(model.ranks)
    terms = list(_kept_in_bf16(model) if model.has_separate_masters else predict_whole(timeline, buckets=False))
    if model.norm_in_fp64:
        terms += norm_terms(timeline, whole_tensors(model.parameters))
    largest = 0
    for members in _reductions(model):
        size = sum(model.bytes_of(number) for number in members)
        largest = max(largest, size if len(members) > 1 else 0)  # one gradient alone is not copied
        sent.add("all_reduce", size)
    terms.append(
        Term("communication", "gradients, flat", largest, timeline.at("backward", "finish"), timeline.at("update"))
    )
    return Prediction(tuple(terms), sent.volumes())


def _reductions(model: ZeroModel) -> Iterator[list[int]]:
    """Yield the parameters whose gradients are summed up together."""
    members, elements = list[int](), 0
    for number in model.trained:
        members.append(number)
        elements += model.parameters[number].numel
        if elements > LARGEST_REDUCTION:
            yield members
            members, elements = [], 0
    if members:
        yield members


def _kept_in_bf16(model: ZeroModel) -> Iterator[Term]:
    """Yield the terms of parameters in bf16 with a master of each, and of gradients, which the update copies."""
    timeline = model.timeline
    update, steady = timeline.at("update"), timeline.at("steady")
    yield from buffer_terms(timeline)
    yield from update_terms(timeline, whole_tensors(model.parameters))
    for number, p in enumerate(model.parameters):
        yield Term("parameters", p.name, model.bytes_of(number))
        if p.trained:
            yield Term("masters", p.name, p.numel * MASTER_BYTES)
            yield from state_terms(timeline, p, p.numel)
            since = 0 if timeline.accumulates else timeline.gradient_at(number)
            yield Term("gradients", p.name, model.bytes_of(number), since, steady)
            yield Term("gradients", f"{p.name} in fp32", p.numel * MASTER_BYTES, update, steady)
