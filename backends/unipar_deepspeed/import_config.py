"""Import of a ds_config.json: each key is carried into a config of unipar, left out with a reason, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unipar.backend.foreign import AUTO, ForeignConfigReader, ForeignSection
from unipar.config import SHARDS
from unipar.config.sections.optimizer import OPTIMIZERS, AdamW
from unipar.distributed import accelerators
from unipar.utils.text import show_value
from unipar_deepspeed.import_sections.import_batch import read_batch
from unipar_deepspeed.import_sections.import_model import read_compile, read_experts, read_sequence, read_tensor
from unipar_deepspeed.import_sections.import_optimizer import read_optimizer
from unipar_deepspeed.import_sections.import_precision import read_precision
from unipar_deepspeed.import_sections.keys import (
    CARRIED_DS_KEYS,
    FIXED_DS_VALUES,
    OF_ZERO,
    OMITTED_DS_KEYS,
    OTHER_STAGE,
    REFUSED_DS_KEYS,
    SCALED_TO_MODEL,
    SPEED,
    ZERO_ALIASES,
    ZERO_FILES,
    ZERO_REFUSED,
    ZERO_SPEED,
)
from unipar_deepspeed.options import DS_KEY_OF_SIZE, SIZES_OF_STAGE

KNOWN = frozenset({*OMITTED_DS_KEYS, *REFUSED_DS_KEYS, *FIXED_DS_VALUES, *CARRIED_DS_KEYS})


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
        reading.put("data.last_batch", "drop", "dataloader_drop_last")
    read_compile(keys)
    read_tensor(keys)
    read_experts(keys)
    read_sequence(keys)
    for key in [key for key in keys.data if key.startswith(("//", "#", "_comment"))]:
        keys.omit({key: "it is a comment"})
    keys.omit(OMITTED_DS_KEYS)
    if not reading.strict:
        _assume_autocast(keys)
    if not reading.strict:
        keys.omit({"autotuning": "it acts only under `deepspeed --autotuning`"})
    keys.refuse(REFUSED_DS_KEYS)
    keys.omit(
        {key: "DeepSpeed reads it in zero_optimization alone, and ignores it here" for key in OF_ZERO if key in keys}
    )
    if not reading.strict:
        keys.omit_unknown(KNOWN, "not known; DeepSpeed ignores such keys")
    for key, (value, why) in FIXED_DS_VALUES.items():
        keys.expect(key, value, why)
    keys.end(KNOWN)


def _assume_autocast(keys: ForeignSection) -> None:
    """Carry `torch_autocast` and dtypes of what is sent as unipar's own, and tell it."""
    reading = keys.reading
    section: Any = keys.data.get("torch_autocast")
    if isinstance(section, dict) and section.get("enabled") is True and "train.precision" not in reading.config:
        keys.below("torch_autocast").leave_rest("unipar's autocast is PyTorch's own")
        reading.assume_default("train.precision", "bf16-mixed", "autocast; gradients are sent in fp32, not in bf16")
    for name in ("communication_data_type", "data_types"):
        if keys.data.get(name):
            value = show_value(keys.data.pop(name))
            reading.read.add(name)
            reading.assumed.append(f"{name}: that of train.precision, where the file says {value}")


def read_clip(keys: ForeignSection) -> None:
    """Carry gradient_clipping; DeepSpeed clips at 1.0 where the file does not say otherwise."""
    if keys.open("gradient_clipping", "train.clip", "1.0"):
        return
    written = "gradient_clipping" in keys
    value = keys.take("gradient_clipping", float, 1.0)
    if value:
        keys.reading.put("train.clip", value, "" if written else "DeepSpeed's own default, where the file says nothing")


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
        section.leave_rest("its type is refused")
        known = ", ".join(_SCHEDULE_OF_TYPE)
        reading.refuse("scheduler.type", f"{kind or 'nothing'} is not among {known}", "train.schedule")
        return
    params = section.below("params")
    section.end()
    warmup = 0
    if not params.open("warmup_num_steps", "train.schedule.warmup", "100"):
        warmup = max(2, params.take("warmup_num_steps", int, 1000))  # DeepSpeed's least is 2
    shape = params.take("warmup_type", str, "log")
    if shape != "linear" and warmup and not reading.strict:
        if not reading.answered("train.schedule"):
            reading.assumed.append(f"train.schedule.warmup: a straight line, where the file's rises as {shape}")
    elif shape != "linear" and warmup:
        default = "DeepSpeed's default, " if shape == "log" else ""
        reading.refuse(
            "scheduler.params.warmup_type",
            f"{shape} ({default}logarithmic); unipar's warm-up is linear",
            "train.schedule",
        )
    reading.put("train.schedule.name", _SCHEDULE_OF_TYPE[kind])
    if "train.schedule.warmup" not in reading.config:
        reading.put("train.schedule.warmup", warmup, _WARMUP_NOTE)
    _read_schedule_ends(params, kind)
    params.end()


def _read_schedule_ends(params: ForeignSection, kind: str) -> None:
    reading = params.reading
    if kind != "WarmupCosineLR":
        params.expect("warmup_min_lr", 0, "unipar's warm-up begins at 0")
        if "train.optimizer.lr" in reading.config and params.data.get("warmup_max_lr") == AUTO:
            params.omit({"warmup_max_lr": "the Trainer fills it with the optimizer's rate"})
        elif not params.open("warmup_max_lr", "train.optimizer.lr", "3.0e-4"):
            default = 1e-3 if kind == "WarmupDecayLR" else 0.0
            if top := params.take("warmup_max_lr", float, default):
                optimizer = OPTIMIZERS.get(reading.config.get("train.optimizer.name", ""), AdamW)
                for key in ("lr", "adamw.lr") if optimizer.whole_matrices else ("lr",):
                    why = "scheduler.params.warmup_max_lr, which overrides optimizer's"
                    reading.put(f"train.optimizer.{key}", top, why)
    else:
        params.expect("warmup_min_ratio", 0, "unipar's warm-up begins at 0")
        reading.put("train.schedule.min_lr_ratio", params.take("cos_min_ratio", float, 1e-4))
    if kind != "WarmupLR" and not params.open("total_num_steps", "train.steps", "1000"):
        steps = params.take("total_num_steps", int, 0)
        if steps and not reading.answered("train.epochs"):
            reading.put("train.steps", steps, "scheduler.params.total_num_steps")
    params.expect("last_batch_iteration", -1, "a run begins at its first step")


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
    for short, name in ZERO_ALIASES.items():
        if short in section:
            value = section.data.pop(short)
            reading.read.add(section.name(short))
            if section.data.setdefault(name, value) != value:
                reading.wrong.append(f"zero_optimization.{short} and {name} are one key, with two values; leave one")
    section.omit(dict.fromkeys(ZERO_SPEED, SPEED))
    section.omit(dict.fromkeys(ZERO_FILES, "it is about files, not about training"))
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
        ("cpu_offload_param", "offload_param"),
    ):
        if section.take(old, bool, default=False):
            section.data.setdefault(new, {"device": "cpu"})
    if not reading.strict:
        _assume_plain_zero(section)
    section.refuse(ZERO_REFUSED, unless=(None, False, {}, 1, 0))
    _read_sizes(section, stage)
    for name in OFFLOAD_KEYS:
        read_offload(section, name)
    _read_groups(section, stage)
    _read_gradient_settings(section, stage)
    section.omit({"ignore_unused_parameters": "unipar allows parameters that the loss does not use"})
    section.expect("compute_grad_norm", True, "unipar logs the norm")
    section.expect("override_module_apply", True, "unipar fills the model itself")
    section.end()


def _assume_plain_zero(section: ForeignSection) -> None:
    """Carry ZeRO++ as ZeRO: the same training without its rounding, or without its copy within a machine."""
    section.omit({"zero_hpz_partition_size": "it is about speed: a second copy of the weights on each machine"})
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if section.take(name, bool, default=False):
            what = "gradients" if name.endswith("gradients") else "weights"
            section.reading.assumed.append(
                f"{section.name(name)}: {what} are sent as they are, where the file's are rounded"
            )


def _read_groups(section: ForeignSection, stage: int) -> None:
    """Carry MiCS: this many ranks split one copy, and each such group has a copy; on native, whose FSDP2 does it."""
    reading, size = section.reading, section.take("mics_shard_size", int, -1)
    section.omit({"mics_hierarchical_params_gather": SPEED})
    if size > 0 and stage < 3:
        reading.omit(section.name("mics_shard_size"), OTHER_STAGE)
    elif size > 1:
        reading.put("parallel.shard_over", size, "zero_optimization.mics_shard_size")
        reading.put("backend", "native", "FSDP2, which splits each copy over some ranks")
        reading.drop_options()


def _read_sizes(section: ForeignSection, stage: int) -> None:
    """Carry the bucket sizes that this stage uses; unipar scales those that the file does not give to the model."""
    for ours, theirs in DS_KEY_OF_SIZE.items():
        if theirs not in section:
            continue
        if section.data[theirs] == AUTO:
            section.omit({theirs: SCALED_TO_MODEL})
        elif ours not in SIZES_OF_STAGE[stage]:
            section.omit({theirs: OTHER_STAGE})
        elif section.data[theirs] in (0, "0") and ours in ("reduce", "gather", "live"):
            section.omit({theirs: f"0 elements are too few; {SCALED_TO_MODEL}"})
        else:
            section.reading.put(f"options.deepspeed.{ours}", int(section.take(theirs, float, 0.0)), theirs)


def _read_gradient_settings(section: ForeignSection, stage: int) -> None:
    """Carry overlap_comm and contiguous_gradients where they differ from what DeepSpeed does by itself."""
    reading = section.reading
    device = reading.overrides.get("device", reading.config.get("device", "auto"))
    cpu = device == "cpu" or (device == "auto" and not accelerators.count_visible_gpus())
    copied = stage < 3 and "options.deepspeed.offload_optimizer" in reading.config
    for theirs, ours, usual, idle in (
        ("overlap_comm", "overlap", stage == 3, "the CPU has no streams" if cpu else ""),
        ("contiguous_gradients", "contiguous", True, "DeepSpeed always copies what is offloaded" if copied else ""),
    ):
        if theirs not in section:
            continue
        if section.data[theirs] == AUTO or stage == 0:
            section.omit({theirs: "DeepSpeed decides" if stage else OTHER_STAGE})
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
    inner.leave_rest(SPEED)
    if device == "none":
        return
    where = {"cpu": "cpu", "nvme": "disk"}.get(device)
    if name == "offload_param" and reading.config.get("parallel.shard", "parameters") != "parameters":
        reading.omit(section.name(name), "parameters are split, and so offloaded, at stage 3 alone")
        return
    if where is None:
        reading.refuse(section.name(name), f"{device} is not among none, cpu and nvme")
        return
    if where == "cpu" and reading.config.get("device") == "cpu":
        reading.omit(section.name(name), "all is on the CPU")
        return
    reading.put(f"options.deepspeed.{OFFLOAD_KEYS[name]}", where)
    if not accelerators.count_visible_gpus():
        reading.put("device", "cuda", "what is offloaded leaves a GPU; this machine has none")
    if where == "disk" and folder:
        reading.put("options.deepspeed.offload_to", folder)
