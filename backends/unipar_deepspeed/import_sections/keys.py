"""Keys of a ds_config.json, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OMITTED_DS_KEYS = {
    "steps_per_print": "unipar logs every log.every steps",
    "wall_clock_breakdown": "unipar always times each phase",
    **dict.fromkeys(("dump_state", "memory_breakdown", "log_level"), "it is about printing"),
    "flops_profiler": "it is about measuring",
    **dict.fromkeys(("comms_logger", "comms_config"), "it is about logging"),
    "timers": "it is about measuring",
    "tensorboard": "say log.to: [tensorboard]",
    "wandb": "say log.to",
    "csv_monitor": "the run folder holds JSON lines",
    "comet": "say log.to",
    "checkpoint": "it is about files, not about training",
    "zero_allow_untested_optimizer": "unipar always sets it",
    "disable_python_gc": "it is about speed",
    "activation_checkpointing": "it is for deepspeed.checkpointing, which your model calls itself",
    "aio": "it is about speed",
    **dict.fromkeys(("comment", "_comment", "comments"), "it is a comment"),
    "monitor_config": "say log.to",
    "seq_parallel_communication_data_type": "the model's sequences are not split",
    "vocabulary_size": "unipar does not need it",
    "prescale_gradients": "unipar divides as one process would",
    "gradient_predivide_factor": "unipar divides as one process would",
    "sparse_gradients": "it is about what is sent; unipar reduces whole gradients",
    "hybrid_engine": "it is about generating",
    "zero_force_ds_cpu_optimizer": "the optimizer is PyTorch's",
}
REFUSED_DS_KEYS = {
    "autotuning": "unipar does not tune settings",
    "elasticity": "a run of unipar keeps its number of ranks",
    "amp": "NVIDIA's apex is not used; say bf16 or fp16",
    "progressive_layer_drop": "unipar does not change the model",
    "eigenvalue": "unipar does not quantize",
    "quantize_training": "unipar does not quantize",
    "compression_training": "unipar does not change the model",
    "weight_quantization": "unipar does not quantize",
    "curriculum_learning": "unipar decides the order of samples by data.shuffle alone",
    "data_efficiency": "unipar decides the order of samples by data.shuffle alone",
    "pipeline": "the stages are in the script's PipelineModule; unipar's are parallel.pipeline, with backend: native",
    "data_parallel_size": "say parallel.data",
    "sparse_attention": "attention is the model's own",
    "zenflow": "unipar has no such mode",
    "torch_autocast": "its gradients travel in bf16, which unipar's bf16-mixed does not; say train.precision",
    **dict.fromkeys(("data_types", "communication_data_type"), "unipar sets dtypes by train.precision"),
    "managed_gradient_accumulation": "unipar sets the boundary itself",
    "datastates_ckpt": "checkpoints are unipar's own",
}
FIXED_DS_VALUES: Mapping[str, tuple[Any, str]] = {
    "gradient_allreduce_op": ("mean", "unipar always takes the mean"),
    "disable_allgather": (False, "unipar has no such mode"),
    "use_data_before_expert_parallelism": (False, "ranks that hold all experts together are neighbours"),
}
CARRIED_DS_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization", "dataloader_drop_last"),
    *("compile", "tensor_parallel", "autotp_size", "sequence_parallel_size", "expert_parallel"),
)
SPEED = "it is about speed"
OTHER_STAGE = "it has no effect at this stage"
SCALED_TO_MODEL = "unipar scales it to the model"
ZERO_SPEED = (
    *("reduce_scatter", "stage3_model_persistence_threshold", "allgather_partitions", "sub_group_size"),
    *("round_robin_gradients", "use_multi_rank_bucket_allreduce", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "memory_efficient_linear"),
    *("log_trace_cache_warnings", "enable_sanity_checks", "parameter_alignment"),
    *("cpu_offload_use_pin_memory", "legacy_stage1", "save_muon_momentum_buffer_in_memory"),
)
ZERO_FILES = (
    *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    *("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"),
)
ZERO_REFUSED = {
    "zero_hpz_partition_size": "ZeRO++ is not supported",
    "zero_quantized_weights": "ZeRO++ rounds weights, which changes the numbers",
    "zero_quantized_nontrainable_weights": "ZeRO++ rounds weights, which changes the numbers",
    "zero_quantized_gradients": "ZeRO++ rounds gradients, which changes the numbers",
    "zenflow": "unipar has no such mode",
    "leaf_module": "unipar splits the model's blocks (model.blocks)",
}
OF_ZERO = ("offload_optimizer", "offload_param", "stage", "overlap_comm", "contiguous_gradients", "reduce_bucket_size")
"""Keys of ZeRO that files have beside the section, where DeepSpeed does not look."""

ZERO_ALIASES = {
    name.removeprefix("stage3_"): name
    for name in (
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
        *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
        "stage3_allgather_sequential",
    )
}
"""Keys of ZeRO that DeepSpeed takes under two names; the second is that of its documentation."""
