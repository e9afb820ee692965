"""Closed forms of what one process, native and local SGD hold and send in a step, for `unipar plan`."""

from __future__ import annotations

from unipar.backend.torch_libraries import uses_ddp
from unipar.config import Config
from unipar.errors import Unsupported
from unipar.prediction.bytes_sent import DDPBuckets, averages
from unipar.prediction.terms import not_planned_yet, predict_whole, refuse_unplanned
from unipar.prediction.timeline import Prediction, StepTimeline
from unipar.prediction.torch_engines import fp64_norm_of_whole, predict_ddp, predict_fsdp2
from unipar_native.options import options_of


def predict_native(config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
    """Return what a rank of native holds and sends, by what is sharded over so many ranks."""
    shard, options = config.parallel.shard, options_of(config)
    more = ["options.native.wrapper: dp"] if options.wrapper == "dp" else []
    refuse_unplanned(f"native/{shard}", config, *more, planned=("model.offload: parameters",))
    if config.train.sync_every is not None:
        whole = *predict_whole(timeline, buckets=False), *fp64_norm_of_whole(config, timeline)
        return Prediction(whole, averages(timeline, config, ranks))
    if not uses_ddp(config):
        return predict_fsdp2(config, timeline, ranks, device=device)
    if options.hook != "none":
        raise Unsupported(f"native/{shard}", [not_planned_yet(f"options.native.hook: {options.hook}")])
    return predict_ddp(config, timeline, ranks, DDPBuckets([options.bucket_mb * 2**20], options.find_unused))
