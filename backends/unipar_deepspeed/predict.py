"""Closed forms of what DeepSpeed holds and sends in a step, for each stage of ZeRO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unipar.backend import offered_strategies as strategies
from unipar.config import SHARDS, Config
from unipar.prediction.terms import clips_in_fp64, refuse_unplanned
from unipar.prediction.timeline import CommVolume, Prediction, StepTimeline
from unipar_deepspeed.options import options_of, zero_settings
from unipar_deepspeed.prediction.autotp_terms import beside_tensor
from unipar_deepspeed.prediction.built import built_terms
from unipar_deepspeed.prediction.flat import predict_flat
from unipar_deepspeed.prediction.partitioned import predict_partitioned
from unipar_deepspeed.prediction.stage_0 import predict_stage_0
from unipar_deepspeed.prediction.zero_model import NORM_BYTES, ZeroModel

LIBRARY_SIZES: dict[str, Any] = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's own sizes, where unipar sets none."""


def predict_zero(config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
    """Return what the fullest of this many ranks holds and sends; raise Unsupported for what has no closed form."""
    stage = SHARDS.index(config.parallel.shard)
    axes = config.parallel.axes
    offload, split = f"model.offload: {config.model.offloaded_state}", f"parallel ({axes})"
    planned = (offload,) if axes.expert > 1 else (offload, split)
    divided = (
        ["model.compile under ZeRO 3, which divides what is compiled,"] if _divides_compiled(config, stage) else []
    )
    refuse_unplanned(str(strategies.strategy_of(config)), config, *divided, planned=planned)
    model = zero_model(config, timeline, ranks // axes.ranks, device=device)
    if stage == 0:
        prediction = predict_stage_0(model)
    elif stage < 3:
        prediction = predict_flat(model, stage=stage)
    else:
        prediction = predict_partitioned(model)
    if stage and model.norm_in_fp64 and axes.tensor == 1 and ranks > 1:
        norm = CommVolume("data", "all_reduce", NORM_BYTES, 1, ranks)
        prediction = replace(prediction, sent=(*prediction.sent, norm))
    if axes.tensor > 1:
        return beside_tensor(prediction, model, config, stage, ranks)
    return replace(prediction, built=tuple(built_terms(model, stage)) if model.staged else ())


def zero_model(config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> ZeroModel:
    """Return the model under ZeRO, with the sizes of its buckets."""
    settings = LIBRARY_SIZES | zero_settings(config, sum(p.numel for p in timeline.parameters))
    low = config.train.precision == "bf16-master"
    options = options_of(config)
    return ZeroModel(
        timeline,
        ranks,
        2 if low else max((p.element_size for p in timeline.parameters), default=4),
        has_separate_masters=low,
        bucket=settings["reduce_bucket_size"],
        prefetch=settings["stage3_prefetch_bucket_size"],
        persistence=settings["stage3_param_persistence_threshold"],
        live=settings["stage3_max_live_parameters"],
        reuse=settings["stage3_max_reuse_distance"],
        staged=device == "cpu",
        norm_in_fp64=clips_in_fp64(config),
        contiguous=bool(settings.get("contiguous_gradients", True)),
        overlap=bool(settings.get("overlap_comm", False)),
        offloaded=options.offload_optimizer != "none",
        own_kernel=options.offload_optimizer != "none" and options.cpu_adam == "library",
        parameters_offloaded=options.offload_parameters != "none",
        optimizer_on_disk=options.offload_optimizer == "disk",
        parameters_on_disk=options.offload_parameters == "disk",
    )


def _divides_compiled(config: Config, stage: int) -> bool:
    """Return whether ZeRO's hooks on modules break up what torch.compile compiles."""
    return stage == 3 and config.model.compiling is not None
