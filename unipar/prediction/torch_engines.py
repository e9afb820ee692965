"""Closed forms of PyTorch's own engines: DDP, ZeroRedundancyOptimizer and FSDP2, whoever wraps the model by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unipar.config import Config
from unipar.errors import Unsupported
from unipar.prediction.bytes_sent import (
    DDPBuckets,
    norm_of_fsdp2,
    sent_by_ddp,
    sent_by_fsdp2,
    shares_of_ranks,
    updated_parameters,
)
from unipar.prediction.fsdp2_groups import ShardedModel
from unipar.prediction.fsdp2_terms import built_sharded, predict_sharded
from unipar.prediction.terms import (
    clips_in_fp64,
    norm_terms,
    not_planned_yet,
    predict_whole,
    update_terms,
    whole_tensors,
)
from unipar.prediction.timeline import Prediction, StepTimeline, Term


def unwrapped_terms(config: Config, timeline: StepTimeline) -> tuple[Term, ...]:
    """Return the terms of a rank that has the whole model without a wrapper."""
    return *predict_whole(timeline, buckets=False), *fp64_norm_of_whole(config, timeline)


def predict_ddp(config: Config, timeline: StepTimeline, ranks: int, buckets: DDPBuckets) -> Prediction:
    """Return what a rank holds and sends under DDP, or ZeroRedundancyOptimizer where the optimizer is sharded."""
    reduced = sent_by_ddp(timeline, buckets, ranks)
    if config.parallel.shard == "nothing":
        return Prediction((*predict_whole(timeline, buckets=True), *fp64_norm_of_whole(config, timeline)), reduced)
    sent = (*reduced, updated_parameters(timeline, ranks))
    terms = *predict_optimizer(timeline, ranks), *fp64_norm_of_whole(config, timeline)
    return Prediction(terms, sent if ranks > 1 else ())


def predict_fsdp2(
    config: Config, timeline: StepTimeline, ranks: int, *, device: str, reshard_rest: bool = True
) -> Prediction:
    """Return what a rank holds and sends under FSDP2, by what is sharded over this number of ranks.

    `reshard_rest`: under `shard: parameters`, what lies outside of blocks is freed after forward, too.
    """
    shard = config.parallel.shard
    strategy = f"{config.backend}/{shard}"
    if scalar := next((p.name for p in timeline.parameters if not p.shape), ""):
        raise Unsupported(strategy, [f"FSDP2 does not take parameters without dimensions, and {scalar} has none"])
    if (compiling := config.model.compiling) is not None and (compiling.what == "model" or not timeline.blocks):
        raise Unsupported(
            strategy, [not_planned_yet("model.compile: model under FSDP2, which divides what is compiled,")]
        )
    over = config.parallel.shard_over or ranks
    assert over != "machine"  # a plan gives a number
    model = ShardedModel(
        timeline,
        over,
        masters=config.train.precision == "bf16-master",
        staged=device == "cpu" and over > 1,
        reshard=shard == "parameters",
        reshard_rest=shard == "parameters" and reshard_rest,
        once=shard == "optimizer",
        offloaded=config.model.offloaded_state == "parameters",
        in_copies=over < ranks,
    )
    fp64 = clips_in_fp64(config)
    copies = ranks // over
    sent = (*sent_by_fsdp2(model, copies), *norm_of_fsdp2(model, copies, fp64=fp64))
    built = tuple(built_sharded(model)) if device == "cpu" else ()  # else that is the host's memory
    return Prediction(tuple(predict_sharded(model, norm_in_fp64=fp64)), sent, built)


def fp64_norm_of_whole(config: Config, timeline: StepTimeline) -> Iterator[Term]:
    """Yield what the norm of whole gradients needs."""
    if clips_in_fp64(config):
        yield from norm_terms(timeline, whole_tensors(timeline.parameters))


def predict_optimizer(timeline: StepTimeline, ranks: int) -> Iterator[Term]:
    """Yield the terms of the fullest rank if each rank keeps the optimizer's state of some whole parameters."""
    share = shares_of_ranks(timeline, ranks)[fullest_rank(timeline, ranks)]
    mine = {p.name for p in share}
    for term in predict_whole(replace(timeline, temporaries_of_update=None), buckets=True):
        if term.category != "optimizer" or term.name.rpartition(" ")[0] in mine:
            yield term
    yield from update_terms(timeline, whole_tensors(share))


def fullest_rank(timeline: StepTimeline, ranks: int) -> int:
    """Return the rank with the most bytes of the optimizer's state, by ZeroRedundancyOptimizer's shares."""
    sizes = [sum(p.numel * sum(p.states) for p in share) for share in shares_of_ranks(timeline, ranks)]
    return sizes.index(max(sizes))
