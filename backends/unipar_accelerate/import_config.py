"""Import of an accelerate.yaml: each key is carried into a config of unipar, left out with a reason, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unipar_deepspeed import import_config

from unipar.backend.foreign import AUTO, ForeignConfigReader, ForeignSection
from unipar.config import SHARDS
from unipar.config.config_file import read_mapping_file
from unipar.errors import ConfigError
from unipar.utils.text import count_of

_LAUNCHER_MATTER = "for the launcher; unipar starts processes itself, or joins those of a launcher"
LAUNCHER_YAML_KEYS = {
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"), _LAUNCHER_MATTER),
    **dict.fromkeys(("same_network", "main_training_function"), _LAUNCHER_MATTER),
    "downcast_bf16": "it is for TPUs",
    "debug": "unipar always names the rank that fails",
    "compute_environment": "this machine",
    "enable_cpu_affinity": "unipar binds no process to a core",
    "mpirun_config": "start the script with mpirun itself",
}
REFUSED_YAML_KEYS = {
    "fp8_config": "unipar has no fp8",
    "megatron_lm_config": "unipar has no Megatron-LM",
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm"), "unipar has no TPUs"),
    **dict.fromkeys(("tpu_env", "command_file", "commands"), "unipar has no TPUs"),
}
CARRIED_YAML_KEYS = (
    *("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu", "gpu_ids"),
    *("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config"),
)
KNOWN = frozenset({*LAUNCHER_YAML_KEYS, *REFUSED_YAML_KEYS, *CARRIED_YAML_KEYS})
_DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_WAYS_OF_THE_MESH = (
    *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable"),
    *("sp_attn_implementation", "cp_handler", "tp_handler", "sp_handler"),
)
"""Keys of parallelism_config that say how, not how many."""

_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16-mixed"}


def read(reading: ForeignConfigReader, data: Mapping[str, Any]) -> None:
    """Carry the whole file into `reading`."""
    keys = reading.section(data)
    if "dynamo_backend" in keys:  # as written by Accelerate before 0.15
        reading.read.add("dynamo_backend")
        keys.data["dynamo_config"] = {"dynamo_backend": keys.data.pop("dynamo_backend")} | keys.data.get(
            "dynamo_config", {}
        )
    if data.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        reading.refuse("compute_environment", f"{data['compute_environment']} is not this machine")
    if keys.data.get("distributed_type") is False:  # NO without quotation marks is false in YAML
        keys.data["distributed_type"] = "NO"
    kind = keys.take("distributed_type", str, "")
    if kind.startswith("MULTI_") and kind not in _DISTRIBUTED_TYPES and not reading.strict:
        reading.assumed.append(f"device: CPU or CUDA, where the file's is {kind.removeprefix('MULTI_')}")
        kind = "MULTI_GPU"
    if kind not in _DISTRIBUTED_TYPES:
        reading.refuse(
            "distributed_type", f"{kind or 'nothing'} is not among {', '.join(_DISTRIBUTED_TYPES)}", "backend"
        )
        kind = "NO"
    _read_world(keys, kind)
    _read_precision(keys, kind)
    fsdp, deepspeed, dynamo = (keys.below(f"{name}_config") for name in ("fsdp", "deepspeed", "dynamo"))
    if kind == "DEEPSPEED":
        _read_deepspeed(deepspeed)
    elif kind == "FSDP":
        _read_fsdp(fsdp)
    else:
        reading.put("backend", "accelerate")
    for other, section in (("DEEPSPEED", deepspeed), ("FSDP", fsdp)):
        if kind != other:
            section.leave_rest(f"it has no effect under distributed_type: {kind}")
    _read_dynamo(dynamo)
    _read_parallelism(keys.below("parallelism_config"))
    if kind != "DEEPSPEED":
        reading.ask("batch, which your script says", "batch", "'{total: 32, micro: 4}'")
        reading.ask_optimizer("the optimizer, which your script makes")
        if "train.optimizer" not in reading.overrides:
            reading.assume("train.clip")
    if "train.precision" not in reading.config and reading.answers and (wanted := reading.answers.precision):
        meaning = "bf16-master" if wanted == "bf16" and kind in ("FSDP", "DEEPSPEED") else _PRECISIONS[wanted]
        reading.put("train.precision", meaning, reading.answers.precision_why)
    keys.omit(LAUNCHER_YAML_KEYS)
    keys.refuse(REFUSED_YAML_KEYS, unless=(None, False, {}, [], "", "no"))
    keys.end(KNOWN)


def _read_world(keys: ForeignSection, kind: str) -> None:
    reading = keys.reading
    machines = keys.take("num_machines", int, 1)
    number = keys.take("num_processes", int, 1 if kind == "NO" else 0)
    if reading.world and number not in (0, reading.world):
        reading.omit("num_processes", f"{number}, but --world says {reading.world}")
    if machines > 1:
        ranks = reading.world or number
        if ranks % machines:
            reading.wrong.append(
                f"num_processes: {count_of(ranks, 'rank')} cannot be divided among {machines} machines; give a "
                f"multiple of {machines} with --world"
            )
        reading.put("machines.nodes", machines, "num_machines; start it with `unipar submit`, or a launcher")
    if number := reading.world or max(number, 0):
        reading.put("parallel.data", number)
        reading.world = number
    if keys.take("use_cpu", bool, default=False) or kind == "MULTI_CPU":
        reading.put("device", "cpu")
    gpus = keys.take("gpu_ids", str, "all")
    if gpus != "all":
        reading.omit("gpu_ids", f"start with CUDA_VISIBLE_DEVICES={gpus}")


def _read_precision(keys: ForeignSection, kind: str) -> None:
    if keys.data.get("mixed_precision") is False:  # as for distributed_type
        keys.data["mixed_precision"] = "no"
    mixed = keys.take("mixed_precision", str, "no").lower()
    reading = keys.reading
    if mixed not in _PRECISIONS:
        reading.refuse("mixed_precision", f"{mixed} is not among {', '.join(_PRECISIONS)}", "train.precision")
    elif mixed == "bf16" and kind in ("FSDP", "DEEPSPEED"):
        reading.put("train.precision", "bf16-master", f"bf16 under {kind}: fp32 masters of bf16 parameters")
    elif mixed == "fp16" and kind in ("FSDP", "DEEPSPEED"):
        reading.put("train.precision", "fp16", f"fp16 under {kind}: autocast over fp32 parameters")
    elif mixed != "no":
        reading.put("train.precision", _PRECISIONS[mixed])


def _read_parallelism(keys: ForeignSection) -> None:
    """Carry the sizes of the mesh: ranks that hold copies, that split them, and that split matrices or sequences."""
    reading = keys.reading
    short = {key.removeprefix("parallelism_config_"): value for key, value in keys.data.items()}
    reading.read.update(map(keys.name, keys.data))
    keys.data = short
    sizes = {name: keys.take(f"{name}_size", int, 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    sizes = {name: max(1, size) for name, size in sizes.items()}
    if sizes["sp"] > 1 and sizes["cp"] > 1:
        reading.refuse("parallelism_config.sp_size", f"{sizes['sp']} beside cp_size {sizes['cp']}: give one of them")
    keys.omit(dict.fromkeys(_WAYS_OF_THE_MESH, "unipar has one way"))
    keys.end()
    if all(size == 1 for size in sizes.values()):
        return
    split, copies = sizes["dp_shard"], sizes["dp_replicate"]
    _put_data_ranks(reading, split * copies, sizes["tp"] * sizes["cp"] * sizes["sp"])
    if split > 1:
        reading.put("parallel.shard", "parameters", "parallelism_config.dp_shard_size")
    if split > 1 and copies > 1:
        reading.put("parallel.shard_over", split, "parallelism_config.dp_shard_size")
        reading.put("backend", "native", "FSDP2 itself, which splits each copy over some ranks")
    for theirs, ours in (("tp", "tensor"), ("cp", "context"), ("sp", "context")):
        if sizes[theirs] > 1:
            reading.put(f"parallel.{ours}", sizes[theirs], f"parallelism_config.{theirs}_size")
    if sizes["tp"] * sizes["cp"] * sizes["sp"] > 1:
        reading.put("backend", "native", "one mesh of all axes")
        reading.drop_options()
        reading.replace_master_weights("mixed_precision", "tp, cp and sp")
    if sizes["sp"] > 1:
        reading.put("options.native.attention", "ulysses", "parallelism_config.sp_size")


def _put_data_ranks(reading: ForeignConfigReader, data: int, others: int) -> None:
    if reading.world and reading.world % others:
        reading.wrong.append(
            f"parallelism_config: {others} ranks for tp and cp do not divide {count_of(reading.world, 'rank')}; "
            f"give a multiple of {others} with --world"
        )
    elif reading.world and data not in (1, reading.world // others):
        reading.wrong.append(
            f"parallelism_config: {data} x {others} = {data * others} is not the number of ranks, {reading.world}; "
            f"give --world {data * others}"
        )
    else:
        ranks = reading.world // others if reading.world else data
        reading.put("parallel.data", ranks, "parallelism_config")


_FSDP_OMITTED = {
    "fsdp_state_dict_type": "it is about files, not about training",
    "fsdp_cpu_ram_efficient_loading": "unipar always fills the model from one rank",
    "fsdp_sync_module_states": "unipar always fills the model from one rank",
    "fsdp_use_orig_params": "FSDP2 always keeps them",
    **dict.fromkeys(("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"), "FSDP2 prefetches by itself"),
    "fsdp_forward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_limit_all_gathers": "FSDP2 limits them by itself",
    "fsdp_version": "unipar uses FSDP2",
}
_SHARD_OF_STRATEGY = {
    **dict.fromkeys(("FULL_SHARD", "1", "true"), "parameters"),
    **dict.fromkeys(("SHARD_GRAD_OP", "2", "false"), "gradients"),
    **dict.fromkeys(("NO_SHARD", "3"), "nothing"),
}


def _read_fsdp(keys: ForeignSection) -> None:
    reading = keys.reading
    reading.read.update(map(keys.name, ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")))
    value = keys.data.pop("fsdp_sharding_strategy", None)
    value = keys.data.pop("fsdp_reshard_after_forward", True) if value is None else value
    strategy = str(value).lower() if isinstance(value, bool) else str(value)
    shard = _SHARD_OF_STRATEGY.get(strategy if strategy in _SHARD_OF_STRATEGY else strategy.upper())
    if strategy.upper() in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
        shard = "parameters" if strategy.upper() in ("HYBRID_SHARD", "4") else "gradients"
        if reading.config.get("machines.nodes"):
            reading.put("parallel.shard_over", "machine", strategy)
    shard = shard or _SHARD_OF_STRATEGY.get(strategy.lower())
    if shard is None:
        reading.refuse("fsdp_config.fsdp_sharding_strategy", f"{strategy} is not carried", "parallel.shard")
        shard = "parameters"
    _put_strategy(reading, shard, "FSDP2")
    if "parallel.shard_over" in reading.config:
        reading.put("backend", "native", "FSDP2 itself, which splits each copy over some ranks")
    policy = keys.take("fsdp_auto_wrap_policy", str, "TRANSFORMER_BASED_WRAP")
    if policy == "NO_WRAP":
        reading.put("model.blocks", "none", "NO_WRAP")
    elif policy == "SIZE_BASED_WRAP" and not reading.strict:
        reading.omit("fsdp_config.fsdp_auto_wrap_policy", f"{policy}: unipar shards by blocks (model.blocks)")
    elif policy != "TRANSFORMER_BASED_WRAP":
        reading.refuse("fsdp_config.fsdp_auto_wrap_policy", f"{policy}: unipar shards by blocks", "model.blocks")
    if "fsdp_transformer_layer_cls_to_wrap" in keys:
        classes = keys.data.pop("fsdp_transformer_layer_cls_to_wrap")
        reading.omit(
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            f"{classes}: unipar finds repeated blocks by itself, or by their names (model.blocks)",
        )
    if keys.take("fsdp_activation_checkpointing", bool, default=False):
        reading.put("model.recompute", "blocks", "fsdp_config.fsdp_activation_checkpointing")
    if keys.take("fsdp_offload_params", bool, default=False):
        reading.put("model.offload", "parameters", "fsdp_config.fsdp_offload_params")
        reading.put("backend", "native", "FSDP2 itself, which keeps parameters in host memory")
    number = keys.take("fsdp_min_num_params", int, 0)
    if number:
        reading.omit("fsdp_config.fsdp_min_num_params", "unipar shards by blocks (model.blocks)")
    keys.omit(_FSDP_OMITTED)
    keys.end(("fsdp_sharding_strategy", "fsdp_reshard_after_forward"))


def _put_strategy(reading: ForeignConfigReader, shard: str, over: str, variant: str = "") -> None:
    """Choose Accelerate's own strategy where the backend has one, else the library that Accelerate would use."""
    from unipar_accelerate import backend

    can = backend.capabilities
    reading.put("parallel.shard", shard)
    if not variant and shard in can.shards:
        reading.put("backend", "accelerate")
    elif variant in can.variants and shard in can.variants[variant].shards:
        reading.put("backend", "accelerate")
        for name, value in can.variants[variant].options.items():
            reading.put(f"options.accelerate.{name}", value, f"over {over}")
    else:
        name = "native" if over == "FSDP2" else "deepspeed"
        reading.put("backend", name, f"{over} itself, which Accelerate would use")


_DEEPSPEED_OMITTED = {
    **dict.fromkeys(("deepspeed_multinode_launcher", "deepspeed_hostfile"), _LAUNCHER_MATTER),
    **dict.fromkeys(("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"), _LAUNCHER_MATTER),
    "zero3_init_flag": "unipar always shards a model while it is created",
    "zero3_save_16bit_model": "it is about files, not about training",
    "deepspeed_moe_layer_cls_names": "unipar splits the model's blocks (model.blocks)",
    "offload_optimizer_nvme_path": "it is about files, not about training",
    "offload_param_nvme_path": "it is about files, not about training",
    "seq_parallel_communication_data_type": "unipar sends what it computes",
    "bf16_enabled": "mixed_precision says it",
    "fp16_enabled": "mixed_precision says it",
    "offload_optimizer_pin_memory": "it is about speed",
    "offload_param_pin_memory": "it is about speed",
}


def _read_deepspeed(keys: ForeignSection) -> None:
    reading = keys.reading
    file = keys.take("deepspeed_config_file", str, "")
    if file:
        inner = reading.section(_load_deepspeed_file(reading, file))
        stage: Any = inner.data.get("zero_optimization", {})
        import_config.read_batch(inner)
        import_config.read_clip(inner)
        import_config.read_all_but_batch(inner)
        stage = stage.get("stage", 0) if isinstance(stage, dict) else 0
        keys.omit(dict.fromkeys(("zero_stage", "gradient_accumulation_steps", "gradient_clipping"), f"{file} says it"))
    else:
        stage = keys.take("zero_stage", int, 2)
        _read_inline_deepspeed(keys)
    shard = SHARDS[stage] if isinstance(stage, int) and 0 <= stage <= 3 else "gradients"
    reading.put("parallel.shard", shard)
    for name in ("offload_optimizer", "offload_param"):
        device = keys.take(f"{name}_device", str, "none")
        if device != "none":
            import_config.read_offload(reading.section({name: {"device": device}}, "deepspeed_config."), name)
    keys.omit(_DEEPSPEED_OMITTED)
    known = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
    if not reading.strict:
        keys.omit_unknown((*known, *_DEEPSPEED_OMITTED), "not known; Accelerate ignores such keys")
    reading.config.pop("parallel.shard", None)
    _put_strategy(reading, shard, "DeepSpeed", "zero")
    keys.end()


def _read_inline_deepspeed(keys: ForeignSection) -> None:
    """Read the DeepSpeed settings of a yaml that names no ds_config.json."""
    reading = keys.reading
    if keys.data.get("gradient_accumulation_steps") == AUTO:
        del keys.data["gradient_accumulation_steps"]
    accumulate = keys.take("gradient_accumulation_steps", int, 1)
    if keys.data.get("gradient_clipping") == AUTO:
        keys.open("gradient_clipping", "train.clip", "1.0")
    elif clip := keys.take("gradient_clipping", float, 0.0):
        reading.put("train.clip", clip)
    if not reading.answered("batch.total") and not reading.answered("batch.micro"):
        reading.ask("batch, which your script says", "batch", f"'{{micro: 4, accumulate: {accumulate}}}'")
    elif not reading.answered("batch.accumulate"):
        reading.put("batch.accumulate", accumulate)
    reading.ask_optimizer("the optimizer, which your script makes")


def _load_deepspeed_file(reading: ForeignConfigReader, file: str) -> Mapping[str, Any]:
    path = reading.locate(file)
    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise ConfigError(
            f"{reading.label}: deepspeed_config.deepspeed_config_file: {file} is a link to {path.resolve()}, outside "
            "of its folder; name the file itself"
        )
    return read_mapping_file(path, "a ds_config.json is one mapping")[0]


def _read_dynamo(keys: ForeignSection) -> None:
    backend = keys.take("dynamo_backend", str, "NO")
    if backend.upper() != "NO":
        keys.reading.put("model.compile", "model", "dynamo_config.dynamo_backend")
    choices = ("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation")
    keys.omit(dict.fromkeys(choices, "torch.compile uses its own choice"))
    keys.end()
