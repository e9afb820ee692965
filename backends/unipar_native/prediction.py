"""Closed forms of what one process, native and local SGD hold and send in a step, for `unipar plan`."""

from __future__ import annotations

from unipar.backend.torch_libraries import uses_ddp
from unipar.config import Config
from unipar.errors import Unsupported
from unipar.prediction.bytes_sent import DDPBuckets, averages
from unipar.prediction.terms import not_planned_yet, refuse_unplanned
from unipar.prediction.timeline import Prediction, StepTimeline
from unipar.prediction.torch_engines import predict_ddp, predict_fsdp2, unwrapped_terms
from unipar_native.options import options_of


def predict_single(config: Config, timeline: StepTimeline) -> Prediction:
    """Return what one process holds, without a wrapper."""
    refuse_unplanned("single", config)
    return Prediction(unwrapped_terms(config, timeline))


def predict_native(config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
    """Return what a rank of native holds and sends, by what is sharded over this number of ranks."""
    shard, options = config.parallel.shard, options_of(config)
    more = ["options.native.wrapper: dp"] if options.wrapper == "dp" else []
    refuse_unplanned(f"native/{shard}", config, *more, planned=("model.offload: parameters",))
    if config.train.local_steps is not None:
        return Prediction(unwrapped_terms(config, timeline), averages(timeline, config, ranks))
    if not uses_ddp(config):
        return predict_fsdp2(config, timeline, ranks, device=device)
    if options.hook != "none":
        raise Unsupported(f"native/{shard}", [not_planned_yet(f"options.native.hook: {options.hook}")])
    return predict_ddp(
        config, timeline, ranks, DDPBuckets([options.bucket_cap_mb * 2**20], options.find_unused_parameters)
    )
