"""Section options.deepspeed: DeepSpeed's settings under unipar's names, and refusals of those without effect."""

from __future__ import annotations

import ctypes.util
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from unipar.backend import resources
from unipar.config import SHARDS, Config, Section
from unipar.distributed.accelerators import count_visible_gpus
from unipar.utils.text import yaml_word

BucketSize = Annotated[int, Field(ge=0)] | Literal["scaled", "library"]
OffloadDevice = Literal["none", "cpu", "disk"]


class DeepSpeedOptions(Section):
    """Section options.deepspeed; DeepSpeed's own name of a setting is given in brackets."""

    buckets: Literal["scaled", "library"] = "scaled"
    """scaled: a sixteenth of the model's parameters, from 65,536 to 5e8; library: DeepSpeed's own 5e8 elements,
    which are many times the size of a small model. The six sizes below follow it where they are not given."""

    reduce: BucketSize | None = None
    """Elements that are reduced at once (`reduce_bucket_size`): a number, scaled or library."""

    gather: BucketSize | None = None
    """Elements that are gathered at once after the update (`allgather_bucket_size`); `optimizer`, `gradients`."""

    prefetch: BucketSize | None = None
    """Elements that are gathered ahead of their use (`stage3_prefetch_bucket_size`); `parameters`."""

    persistence: BucketSize | None = None
    """Parameters with fewer elements stay whole (`stage3_param_persistence_threshold`); `parameters`. scaled: 4,096."""

    live: BucketSize | None = None
    """Elements that are whole at once, at most (`stage3_max_live_parameters`); `parameters`. scaled: 2 buckets."""

    reuse: BucketSize | None = None
    """Parameters that are used again within this number of elements stay full (`stage3_max_reuse_distance`);
    `parameters`. scaled: 0."""

    overlap: bool | None = None
    """Reduce while the backward goes on (`overlap_comm`); null: as DeepSpeed decides. Needs CUDA's streams."""

    contiguous: bool = True
    """Copy gradients into one buffer as they come (`contiguous_gradients`)."""

    offload_optimizer: OffloadDevice = "none"
    """Place where masters and moments are kept and updated (`offload_optimizer.device`): cpu, or disk (`nvme`)."""

    offload_parameters: OffloadDevice = "none"
    """Place where sharded parameters are kept while unused (`offload_param.device`): cpu, or disk (`nvme`);
    `parameters`."""

    offload_to: str | None = None
    """Folder on the disk (`nvme_path`); its files are removed when the run ends, but empty folders stay."""

    cpu_adam: Literal["library", "torch"] = "library"
    """Optimizer of offloaded parameters. library: DeepSpeed's CPU Adam, compiled once (a minute); torch: PyTorch's."""


DS_KEY_OF_SIZE = {
    "reduce": "reduce_bucket_size",
    "gather": "allgather_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "persistence": "stage3_param_persistence_threshold",
    "live": "stage3_max_live_parameters",
    "reuse": "stage3_max_reuse_distance",
}
SIZES_OF_STAGE: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("reduce", "gather"),
    2: ("reduce", "gather"),
    3: ("reduce", "prefetch", "persistence", "live", "reuse"),
}


def options_of(config: Config) -> DeepSpeedOptions:
    """Return options.deepspeed, with model.offload expressed in them."""
    return DeepSpeedOptions.model_validate(_neutral_offload(config) | config.options.get("deepspeed", {}))


def _neutral_offload(config: Config) -> dict[str, OffloadDevice]:
    """Return the options that model.offload stands for."""
    if config.model.offloaded_state == "none":
        return {}
    return {
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu" if config.model.offloaded_state == "parameters" else "none",
    }


def zero_settings(config: Config, parameters: int | None) -> dict[str, Any]:
    """Return DeepSpeed's section `zero_optimization`."""
    stage, options = SHARDS.index(config.parallel.shard), options_of(config)
    settings: dict[str, Any] = {"stage": stage}
    if stage == 3:
        settings["memory_efficient_linear"] = False  # it would replace F.linear in the whole process
    for name in SIZES_OF_STAGE[stage]:
        own_size = getattr(options, name)
        size = options.buckets if own_size is None else own_size
        if size != "library":
            settings[DS_KEY_OF_SIZE[name]] = _scaled_size(name, parameters) if size == "scaled" else size
    if stage and options.overlap is not None:
        settings["overlap_comm"] = options.overlap
    if stage and not options.contiguous:
        settings["contiguous_gradients"] = False
    for key, device in (
        ("offload_optimizer", options.offload_optimizer),
        ("offload_param", options.offload_parameters),
    ):
        if device != "none":
            settings[key] = {"device": "nvme" if device == "disk" else device, "pin_memory": _has_cuda(config)}
            if device == "disk":
                settings[key]["nvme_path"] = str(Path(options.offload_to or "").resolve())
    return settings


def remove_offload_files(config: Config, ranks: Iterable[int]) -> None:
    """Remove the offload files of these ranks."""
    folder = options_of(config).offload_to
    for rank in () if folder is None else ranks:
        for left in Path(folder or "").resolve().glob(f"zero_stage_3/*/rank{rank}"):
            shutil.rmtree(left, ignore_errors=True)


def _scaled_size(name: str, parameters: int | None) -> int | str:
    if name == "persistence":
        return 4_096
    if name == "reuse":
        return 0
    times = 2 if name == "live" else 1
    if parameters is None:
        return "parameters // 32 * 2, from 65,536 to 5e8" + (f", times {times}" if times > 1 else "")
    return times * min(max(parameters // 32 * 2, 65_536), 500_000_000)  # DeepSpeed refuses to gather an odd number


def _has_cuda(config: Config) -> bool:
    return resources.choose_device(config)[0] != "cpu"


def deepspeed_option_refusals(config: Config) -> Iterator[str]:
    """Yield a sentence for each option that has no effect in this strategy or is not supported."""
    stage, options = SHARDS.index(config.parallel.shard), options_of(config)
    own = DeepSpeedOptions.model_validate(config.options.get("deepspeed", {}))
    here = f"parallel.shard: {config.parallel.shard}"
    settings = {name: value for name, value in own.model_dump(exclude_defaults=True).items() if value is not None}
    if stage == 0:
        for name, value in settings.items():
            yield f"options.deepspeed.{name}: {yaml_word(value)} has no effect, as nothing is split; leave it out"
        return
    for name in settings:
        if name in DS_KEY_OF_SIZE and name not in SIZES_OF_STAGE[stage]:
            yield f"options.deepspeed.{name}: {yaml_word(settings[name])} has no effect with {here}; leave it out"
    for name in ("reduce", "gather", "live"):
        if settings.get(name) == 0:
            yield f"options.deepspeed.{name}: 0 elements are too few; give a number above 0"
    if isinstance(gather := settings.get("gather"), int) and gather % 2:
        yield f"options.deepspeed.gather: {gather} is odd, and DeepSpeed wants an even number; give {gather + 1}"
    if options.overlap is not None and not _has_cuda(config):
        yield "options.deepspeed.overlap has no effect on the CPU, which has no streams; leave it out"
    if config.parallel.expert > 1 and not options.contiguous and stage < 3:
        yield (
            "options.deepspeed.contiguous: false is not available with parallel.expert: DeepSpeed's ZeRO-1 then trains "
            "another model (the first norm was off by 1.5e-01), and its ZeRO-2 raises an error; leave it out"
        )
    yield from _offload_refusals(config, options, stage)


def _offload_refusals(config: Config, options: DeepSpeedOptions, stage: int) -> Iterator[str]:
    optimizer, parameters, neutral = options.offload_optimizer, options.offload_parameters, config.model.offloaded_state
    for name, wanted in _neutral_offload(config).items():
        if (value := getattr(options, name)) != wanted:
            yield (
                f"options.deepspeed.{name}: {value} contradicts model.offload: {neutral}, which is {name}: {wanted}; "
                "leave one of them out"
            )
    asked = f"options.deepspeed.offload_parameters: {parameters}" if neutral == "none" else f"model.offload: {neutral}"
    disk = "disk" in (optimizer, parameters)
    if parameters != "none" and stage < 3:
        yield (f"{asked} needs parallel.shard: parameters, as {config.parallel.shard} leaves them whole on every rank")
    refused_by_core = neutral != "none" and config.device == "cpu"  # for every backend alike
    if parameters == "cpu" and not _has_cuda(config) and not refused_by_core:
        yield f"{asked} has no effect on the CPU, where the parameters are already; leave it out"
    if optimizer == "disk" and stage < 3:
        yield (
            "options.deepspeed.offload_optimizer: disk needs parallel.shard: parameters (with "
            f"{config.parallel.shard} DeepSpeed treats it as cpu); say cpu"
        )
    if disk and options.offload_to is None:
        yield "options.deepspeed: disk needs a folder, offload_to: /path/on/that/disk"
    if disk and _can_start_here(config) and not _has_libaio():
        yield "options.deepspeed: disk needs libaio, which is not installed: apt install libaio-dev, or say cpu"
    if options.offload_to is not None and not disk:
        yield "options.deepspeed.offload_to has no effect, as nothing goes to disk; leave it out"
    if optimizer == "none" and options.cpu_adam == "torch":
        yield "options.deepspeed.cpu_adam: torch has no effect, as the optimizer is not offloaded; leave it out"
    if optimizer != "none" and not options.contiguous and stage < 3:
        yield (
            "options.deepspeed.contiguous: false has no effect, as DeepSpeed always copies gradients that are "
            "offloaded; leave it out"
        )
    clip = config.train.clipping
    if optimizer != "none" and clip is not None and clip.norm == "fp64":
        yield "train.clip: the fp64 norm is not supported for offloaded gradients; leave norm out"
    if disk and config.train.ema is not None:
        yield (
            f"train.ema is not available with {'offload_optimizer' if optimizer == 'disk' else 'offload_parameters'}: "
            "disk: DeepSpeed reads weights into buffers that it uses again, so that averages cannot take their place; "
            "say cpu, or leave train.ema out"
        )
    if optimizer == "disk" and config.train.precision == "bf16-master":
        yield (
            "train.precision: bf16-master is not supported with offload_optimizer: disk, as the masters are on the "
            "disk; say cpu"
        )
    if optimizer == "disk" and "exp_avg" not in config.train.optimizer.gradient_sums:
        yield "options.deepspeed.offload_optimizer: disk supports only adam and adamw, whose moments it swaps; say cpu"


def _can_start_here(config: Config) -> bool:
    """Return whether this machine has the device; a plan for GPUs is made where there are none, too."""
    return not _has_cuda(config) or count_visible_gpus() > 0


def _has_libaio() -> bool:
    header = any((Path(folder) / "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    return header and ctypes.util.find_library("aio") is not None
