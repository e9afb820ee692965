"""Entry of native's closed forms: one process, DDP, ZeroRedundancyOptimizer, FSDP2 and local SGD."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unipar.backend.prediction.terms import (
    clips_in_fp64,
    norm_terms,
    not_planned_yet,
    predict_whole,
    refuse_unplanned,
    update_terms,
    whole_tensors,
)
from unipar.backend.prediction.timeline import Prediction, StepTimeline, Term
from unipar.config import Config
from unipar.errors import Unsupported
from unipar_native import options_of, uses_ddp
from unipar_native.prediction.groups import ShardedModel
from unipar_native.prediction.payloads import (
    DDPBuckets,
    averages,
    norm_of_fsdp2,
    sent_by_ddp,
    sent_by_fsdp2,
    shares_of_ranks,
    updated_parameters,
)
from unipar_native.prediction.sharded import built_sharded, predict_sharded


def predict_single(config: Config, timeline: StepTimeline) -> Prediction:
    """Return what one process holds, without a wrapper."""
    refuse_unplanned("single", config)
    return Prediction((*predict_whole(timeline, buckets=False), *_norm(config, timeline)))


def predict_native(
    config: Config,
    timeline: StepTimeline,
    ranks: int,
    *,
    device: str,
    reshard_rest: bool = True,
    buckets: DDPBuckets | None = None,
) -> Prediction:
    """Return what a rank of native holds and sends, by what is split over so many ranks.

    `reshard_rest`: under `shard: parameters`, what lies outside of blocks is freed after forward, too. `buckets`: how
    DDP sends gradients; None: as options.native say.
    """
    shard = config.parallel.shard
    _refuse_unplanned(f"native/{shard}", config)
    if config.train.sync_every is not None:
        whole = *predict_whole(timeline, buckets=False), *_norm(config, timeline)
        return Prediction(whole, averages(timeline, config, ranks))
    if uses_ddp(config):
        options = options_of(config)
        if options.hook != "none":
            raise Unsupported(f"native/{shard}", [not_planned_yet(f"options.native.hook: {options.hook}")])
        reduced = sent_by_ddp(timeline, buckets or DDPBuckets([options.bucket_mb * 2**20], options.find_unused), ranks)
        if shard == "nothing":
            return Prediction((*predict_whole(timeline, buckets=True), *_norm(config, timeline)), reduced)
        sent = (*reduced, updated_parameters(timeline, ranks))
        terms = *predict_optimizer(timeline, ranks), *_norm(config, timeline)
        return Prediction(terms, sent if ranks > 1 else ())
    if scalar := next((p.name for p in timeline.parameters if not p.shape), ""):
        raise Unsupported(
            f"native/{shard}", [f"FSDP2 does not take parameters without dimensions, and {scalar} has none"]
        )
    if (compiling := config.model.compiling) is not None and (compiling.what == "model" or not timeline.blocks):
        raise Unsupported(
            f"native/{shard}", [not_planned_yet("model.compile: model under FSDP2, which divides what is compiled,")]
        )
    over = config.parallel.shard_over or ranks
    assert over != "machine"  # a plan gives a number
    model = ShardedModel.of(
        timeline,
        over,
        masters=config.train.precision == "bf16-master",
        staged=device == "cpu",
        reshard=shard == "parameters",
        reshard_rest=shard == "parameters" and reshard_rest,
        once=shard == "optimizer",
        offloaded=config.model.offload == "parameters",
        in_copies=over < ranks,
    )
    fp64 = clips_in_fp64(config)
    copies = ranks // over
    sent = (*sent_by_fsdp2(model, copies), *norm_of_fsdp2(model, copies, fp64=fp64))
    built = tuple(built_sharded(model)) if device == "cpu" else ()  # else that is the host's memory
    return Prediction(tuple(predict_sharded(model, norm_in_fp64=fp64)), sent, built)


def _norm(config: Config, timeline: StepTimeline) -> Iterator[Term]:
    """Yield what the norm of whole gradients needs."""
    if clips_in_fp64(config):
        yield from norm_terms(timeline, whole_tensors(timeline.parameters))


def _refuse_unplanned(cell: str, config: Config) -> None:
    """Raise Unsupported for settings that the closed forms do not cover."""
    more = ["options.native.wrapper: dp"] if options_of(config).wrapper == "dp" else []
    refuse_unplanned(cell, config, *more, planned=("model.offload: parameters",))


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
