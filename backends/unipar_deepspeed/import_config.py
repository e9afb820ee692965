"""Import of a ds_config.json: each key is carried into a config of unipar, left out with a reason, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unipar.backend.foreign import AUTO, ForeignConfigReader, ForeignSection
from unipar.config import SHARDS
from unipar.distributed import gpus
from unipar.utils.text import show_value
from unipar_deepspeed.options import DS_KEY_OF_SIZE, SIZES_OF_STAGE

OMITTED_DS_KEYS = {
    "steps_per_print": "unipar logs every log.every steps",
    "wall_clock_breakdown": "unipar always times each phase",
    "dump_state": "it is about printing",
    "memory_breakdown": "it is about printing",
    "log_level": "it is about printing",
    "flops_profiler": "it is about measuring",
    "comms_logger": "it is about logging",
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
    "hybrid_engine": "unipar trains, and does not generate",
    "tensor_parallel": "say parallel.tensor; unipar finds how matrices are split itself",
    "autotp_size": "say parallel.tensor; unipar finds how matrices are split itself",
    "pipeline": "unipar splits data and state, not yet layers",
    "expert_parallel": "unipar splits data and state, not experts",
    "sequence_parallel_size": "unipar splits data and state, not sequences",
    "data_parallel_size": "say parallel.data",
    "sparse_attention": "attention is the model's own",
    "sparse_gradients": "unipar reduces whole gradients",
    "compile": "say model.compile",
    "zenflow": "unipar has no such mode",
    "torch_autocast": "its gradients travel in bf16, which unipar's bf16-mixed does not; say train.precision",
    "data_types": "unipar sets dtypes by train.precision",
    "communication_data_type": "unipar sets dtypes by train.precision",
    "seq_parallel_communication_data_type": "unipar sets dtypes by train.precision",
    "zero_force_ds_cpu_optimizer": "the optimizer is PyTorch's",
    "managed_gradient_accumulation": "unipar sets the boundary itself",
    "vocabulary_size": "unipar does not need it",
    "datastates_ckpt": "checkpoints are unipar's own",
}
FIXED_DS_VALUES: Mapping[str, tuple[Any, str]] = {
    "prescale_gradients": (False, "unipar divides as one process would"),
    "gradient_predivide_factor": (1.0, "unipar divides as one process would"),
    "gradient_allreduce_op": ("mean", "unipar always takes the mean"),
    "disable_allgather": (False, "unipar has no such mode"),
    "use_data_before_expert_parallelism": (False, "unipar has no experts"),
}
CARRIED_DS_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization", "dataloader_drop_last"),
)
KNOWN = frozenset({*OMITTED_DS_KEYS, *REFUSED_DS_KEYS, *FIXED_DS_VALUES, *CARRIED_DS_KEYS})

_SPEED = "it is about speed"
_OTHER_STAGE = "it has no effect at this stage"
_SCALED_TO_MODEL = "unipar scales it to the model"
_ZERO_CARRIED = ("stage", "overlap_comm", "contiguous_gradients")
_ZERO_SPEED = (
    *("reduce_scatter", "stage3_model_persistence_threshold", "allgather_partitions", "sub_group_size"),
    *("round_robin_gradients", "use_multi_rank_bucket_allreduce", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "memory_efficient_linear"),
    *("log_trace_cache_warnings", "enable_sanity_checks", "parameter_alignment"),
)
_ZERO_FILES = (
    *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    *("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"),
)
_ZERO_REFUSED = {
    "zero_hpz_partition_size": "ZeRO++ is not supported",
    "zero_quantized_weights": "ZeRO++ rounds weights, which changes the numbers",
    "zero_quantized_nontrainable_weights": "ZeRO++ rounds weights, which changes the numbers",
    "zero_quantized_gradients": "ZeRO++ rounds gradients, which changes the numbers",
    "zenflow": "unipar has no such mode",
    "cpu_offload": "an old key; say offload_optimizer",
    "cpu_offload_param": "an old key; say offload_param",
    "cpu_offload_use_pin_memory": "an old key; say offload_optimizer",
    "leaf_module": "unipar splits the model's blocks (model.blocks)",
    "legacy_stage1": "unipar has the new stage 1 only",
    "save_muon_momentum_buffer_in_memory": "unipar has sgd, adam and adamw",
}


def read(reading: ForeignConfigReader, data: Mapping[str, Any]) -> None:
    """Carry the whole file into `reading`."""
    reading.put("backend", "deepspeed")
    keys = reading.section(data)
    read_batch(keys)
    read_clip(keys)
    read_all_but_batch(keys)


def read_all_but_batch(keys: ForeignSection) -> None:
    """Carry all keys but batch and clip, which an accelerate.yaml may hold itself."""
    reading = keys.reading
    read_optimizer(keys)
    read_scheduler(keys)
    read_precision(keys)
    read_zero(keys)
    if keys.take("dataloader_drop_last", bool, default=False):
        reading.put("data.ragged", "drop", "dataloader_drop_last")
    keys.omit(OMITTED_DS_KEYS)
    keys.refuse(REFUSED_DS_KEYS)
    for key, (value, why) in FIXED_DS_VALUES.items():
        keys.expect(key, value, why)
    keys.end(KNOWN)


def read_batch(keys: ForeignSection) -> None:
    """Carry the three batch sizes: two of them give the third, and all three give the number of ranks."""
    reading = keys.reading
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: keys.take(name, int, 0) for name in names if keys.data.get(name) not in (None, AUTO)}
    autos = [name for name in names if keys.data.pop(name, None) == AUTO]
    total, micro, accumulate = (given.get(name, 0) for name in names)
    world = reading.world
    if total and micro and accumulate and not world:
        if total % (micro * accumulate):
            reading.wrong.append(
                f"train_batch_size: {total} is not a multiple of train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps ({micro} x {accumulate} = {micro * accumulate})"
            )
        else:
            world = total // (micro * accumulate)
            reading.put("parallel.data", world, f"{total} / ({micro} x {accumulate})")
    elif total and micro and accumulate and world and total != micro * accumulate * world:
        reading.wrong.append(
            f"train_batch_size: {total} is not {micro} x {accumulate} x {world} ranks = {micro * accumulate * world}"
        )
    if world:
        reading.put("parallel.data", world)
    if total:
        reading.put("batch.total", total)
    if micro:
        reading.put("batch.micro", micro)
    if accumulate and not (total and micro):
        reading.put("batch.accumulate", accumulate)
    elif micro and not total and "gradient_accumulation_steps" not in autos:
        reading.put("batch.accumulate", 1)
    enough = total or (micro and (accumulate or "gradient_accumulation_steps" not in autos))
    if not enough:
        what = ", ".join(f'{name}: "auto"' for name in autos) or names[0]
        reading.ask(what, "batch", "'{total: 32, micro: 4}'")


def read_clip(keys: ForeignSection) -> None:
    """Carry gradient_clipping; DeepSpeed clips at 1.0 where the file does not say otherwise."""
    if keys.open("gradient_clipping", "train.clip", "1.0"):
        return
    given = "gradient_clipping" in keys
    value = keys.take("gradient_clipping", float, 1.0)
    if value:
        keys.reading.put("train.clip", value, "" if given else "DeepSpeed's own default, where the file says nothing")


def read_optimizer(keys: ForeignSection) -> None:
    """Carry the section `optimizer`."""
    reading = keys.reading
    if "optimizer" not in keys:
        reading.ask("optimizer, which your script makes", "train.optimizer", "'{name: adamw, lr: 3.0e-4}'")
        return
    section = keys.below("optimizer")
    kind = section.take("type", str, "")
    names = {"adam": "adam", "adamw": "adamw", "sgd": "sgd"}
    name = names.get(kind.lower())
    if name is None:
        section.data.clear()
        reading.refuse("optimizer.type", f"{kind or 'nothing'} is not among sgd, adam and adamw", "train.optimizer")
        return
    section.omit({"legacy_fusion": "it is about speed"})
    params = section.below("params")
    section.end(("type", "params", "legacy_fusion"))
    torch_adam = params.take("torch_adam", bool, default=False)
    note = ""
    if name == "adam" and params.take("adam_w_mode", bool, default=True):
        name, note = "adamw", "DeepSpeed's Adam is AdamW unless adam_w_mode is false"
    params.data.pop("adam_w_mode", None)
    reading.put("train.optimizer.name", name, note)
    _read_optimizer_params(params, name, torch_adam=torch_adam)


def _read_optimizer_params(params: ForeignSection, name: str, *, torch_adam: bool) -> None:
    reading = params.reading
    if not params.open("lr", "train.optimizer.lr", "3.0e-4"):
        reading.put("train.optimizer.lr", params.take("lr", float, 1e-3))
    if not params.open("weight_decay", "train.optimizer.weight_decay", "0.01"):
        default = 0.01 if name == "adamw" and torch_adam else 0.0
        note = "torch.optim.AdamW's default" if "weight_decay" not in params and default else ""
        reading.put("train.optimizer.weight_decay", params.take("weight_decay", float, default), note)
    if name == "sgd":
        reading.put("train.optimizer.momentum", params.take("momentum", float, 0.0))
        reading.put("train.optimizer.nesterov", params.take("nesterov", bool, default=False))
    else:
        if not params.open("betas", "train.optimizer.betas", "'[0.9, 0.999]'"):
            reading.put("train.optimizer.betas", [float(b) for b in params.take("betas", list, [0.9, 0.999])])
        if not params.open("eps", "train.optimizer.eps", "1.0e-8"):
            reading.put("train.optimizer.eps", params.take("eps", float, 1e-8))
    for kernel in ("fused", "foreach"):
        if kernel in params:
            reading.put(f"train.optimizer.{kernel}", params.take(kernel, bool, default=False))
    params.expect("bias_correction", True, "unipar's Adam always corrects the bias")
    params.expect("amsgrad", False, "unipar's Adam has no AMSGrad")
    params.expect("dampening", 0, "unipar's SGD has no dampening")
    params.expect("maximize", False, "unipar minimizes")
    params.end(
        ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "torch_adam", "adam_w_mode", "fused", "foreach")
    )


_SCHEDULE_OF_TYPE = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_WARMUP_NOTE = "DeepSpeed's warm-up is two steps later: its first two steps have rate 0"


def read_scheduler(keys: ForeignSection) -> None:
    """Carry the section `scheduler`."""
    if "scheduler" not in keys:
        return
    reading = keys.reading
    section = keys.below("scheduler")
    kind = section.take("type", str, "")
    if kind not in _SCHEDULE_OF_TYPE:
        section.data.clear()
        known = ", ".join(_SCHEDULE_OF_TYPE)
        reading.refuse("scheduler.type", f"{kind or 'nothing'} is not among {known}", "train.schedule")
        return
    params = section.below("params")
    section.end(("type", "params"))
    warmup = 0
    if not params.open("warmup_num_steps", "train.schedule.warmup", "100"):
        warmup = max(2, params.take("warmup_num_steps", int, 1000))  # DeepSpeed's least is 2
    shape = params.take("warmup_type", str, "log")
    if shape != "linear" and warmup:
        default = "DeepSpeed's default, " if shape == "log" else ""
        reading.refuse(
            "scheduler.params.warmup_type",
            f"{shape} ({default}logarithmic); unipar's warm-up is linear",
            "train.schedule",
        )
    reading.put("train.schedule.name", _SCHEDULE_OF_TYPE[kind])
    reading.put("train.schedule.warmup", warmup, _WARMUP_NOTE)
    _read_schedule_ends(params, kind)
    params.end(
        ("warmup_num_steps", "warmup_type", "warmup_min_lr", "warmup_max_lr", "total_num_steps", "cos_min_ratio")
    )


def _read_schedule_ends(params: ForeignSection, kind: str) -> None:
    reading = params.reading
    if kind != "WarmupCosineLR":
        params.expect("warmup_min_lr", 0, "unipar's warm-up begins at 0")
        if not params.open("warmup_max_lr", "train.optimizer.lr", "3.0e-4"):
            default = 1e-3 if kind == "WarmupDecayLR" else 0.0
            if top := params.take("warmup_max_lr", float, default):
                reading.put("train.optimizer.lr", top, "scheduler.params.warmup_max_lr, which overrides optimizer's")
    else:
        params.expect("warmup_min_ratio", 0, "unipar's warm-up begins at 0")
        reading.put("train.schedule.end", params.take("cos_min_ratio", float, 1e-4))
    if kind != "WarmupLR" and not params.open("total_num_steps", "train.steps", "1000"):
        steps = params.take("total_num_steps", int, 0)
        if steps and not reading.answered("train.epochs"):
            reading.put("train.steps", steps, "scheduler.params.total_num_steps")
    params.expect("last_batch_iteration", -1, "a run begins at its first step")


def read_precision(keys: ForeignSection) -> None:
    """Carry the sections `bf16` and `fp16`."""
    reading = keys.reading
    chosen: list[str] = []
    for name, meaning in (("bf16", "bf16-master"), ("bfloat16", "bf16-master"), ("fp16", "fp16")):
        if name not in keys:
            continue
        section = keys.below(name)
        if section.open("enabled", "train.precision", meaning):
            section.data.clear()
            continue
        if not section.take("enabled", bool, default=False):
            section.data.clear()
            continue
        chosen.append(name)
        note = f"{name}.enabled"
        reading.put("train.precision", meaning, f"{note}: autocast over fp32" if meaning == "fp16" else note)
        scaling = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        section.omit(dict.fromkeys(scaling, "the loss is scaled by unipar's rule"))
        section.expect("auto_cast", False, "unipar casts a batch's floating-point tensors")
        mixed = "masters and moments are fp32 in unipar"
        section.refuse(dict.fromkeys((f"{name}_master_weights_and_grads", f"{name}_optimizer_states"), mixed))
        section.omit({"check_overflow": "unipar checks every loss", "consecutive_hysteresis": "it is about scaling"})
        section.refuse({"immediate_grad_update": "unipar reduces by its own rule"}, unless=(True, False))
        section.end(("enabled", "auto_cast", *scaling))
    if len(chosen) > 1:
        reading.wrong.append(f"{chosen[0]} and {chosen[1]} are both enabled; leave one of them")


def read_zero(keys: ForeignSection) -> None:
    """Carry the section `zero_optimization`."""
    if "zero_optimization" not in keys:
        return
    reading = keys.reading
    section = keys.below("zero_optimization")
    stage = section.take("stage", int, 0)
    if not 0 <= stage <= 3:
        reading.wrong.append(f"zero_optimization.stage: {stage} is not one of 0, 1, 2 and 3")
        stage = 0
    reading.put("parallel.shard", SHARDS[stage], f"ZeRO stage {stage}")
    section.omit(dict.fromkeys(_ZERO_SPEED, _SPEED))
    section.omit(dict.fromkeys(_ZERO_FILES, "it is about files, not about training"))
    section.refuse(_ZERO_REFUSED, unless=(None, False, {}, 1, 0))
    _read_sizes(section, stage)
    for name in OFFLOAD_KEYS:
        read_offload(section, name)
    _read_gradient_settings(section, stage)
    section.expect("ignore_unused_parameters", True, "unipar allows parameters that the loss does not use")
    section.expect("compute_grad_norm", True, "unipar logs the norm")
    section.expect("override_module_apply", True, "unipar fills the model itself")
    section.end((*_ZERO_CARRIED, *OFFLOAD_KEYS, *DS_KEY_OF_SIZE.values(), *_ZERO_SPEED, *_ZERO_FILES, *_ZERO_REFUSED))


def _read_sizes(section: ForeignSection, stage: int) -> None:
    """Carry the bucket sizes that this stage uses; unipar scales those that the file does not give to the model."""
    for ours, theirs in DS_KEY_OF_SIZE.items():
        if theirs not in section:
            continue
        if section.data[theirs] == AUTO:
            section.omit({theirs: _SCALED_TO_MODEL})
        elif ours not in SIZES_OF_STAGE[stage]:
            section.omit({theirs: _OTHER_STAGE})
        else:
            section.reading.put(f"options.deepspeed.{ours}", int(section.take(theirs, float, 0.0)), theirs)


def _read_gradient_settings(section: ForeignSection, stage: int) -> None:
    """Carry overlap_comm and contiguous_gradients where they differ from what DeepSpeed does by itself."""
    reading = section.reading
    device = reading.said.get("device", reading.config.get("device", "auto"))
    cpu = device == "cpu" or (device == "auto" and not gpus.count_visible_gpus())
    copied = stage < 3 and "options.deepspeed.offload_optimizer" in reading.config
    for theirs, ours, usual, idle in (
        ("overlap_comm", "overlap", stage == 3, "the CPU has no streams" if cpu else ""),
        ("contiguous_gradients", "contiguous", True, "DeepSpeed always copies what is offloaded" if copied else ""),
    ):
        if theirs not in section:
            continue
        if section.data[theirs] == AUTO or stage == 0:
            section.omit({theirs: "DeepSpeed decides" if stage else _OTHER_STAGE})
        elif (wanted := section.take(theirs, bool, default=usual)) == usual:
            reading.omit(section.name(theirs), f"{show_value(wanted)} is what DeepSpeed does at this stage by itself")
        elif idle:
            reading.omit(section.name(theirs), idle)
        else:
            reading.put(f"options.deepspeed.{ours}", wanted, theirs)


OFFLOAD_KEYS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""DeepSpeed's names of the offload sections, with unipar's options."""


def read_offload(section: ForeignSection, name: str) -> None:
    """Carry an offload section: the place where the optimizer or the parameters are kept."""
    if name not in section:
        return
    reading, inner = section.reading, section.below(name)
    device = inner.take("device", str, "none")
    folder = inner.take("nvme_path", str, "")
    inner.data.clear()  # the rest is about speed
    if device == "none":
        return
    where = {"cpu": "cpu", "nvme": "disk"}.get(device)
    if where is None:
        reading.refuse(section.name(name), f"{device} is not among none, cpu and nvme")
        return
    reading.put(f"options.deepspeed.{OFFLOAD_KEYS[name]}", where)
    if where == "disk" and folder:
        reading.put("options.deepspeed.offload_to", folder)
