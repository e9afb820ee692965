"""options.deepspeed: DeepSpeed's settings under our names, what it is told for them, and which have no effect where."""

from __future__ import annotations

import ctypes.util
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from unipar.backend import resources
from unipar.config import SHARDS, Config, Section
from unipar.config.sections.optimizer import SGD

BucketSize = Annotated[int, Field(ge=0)] | Literal["scaled", "library"]
OffloadDevice = Literal["none", "cpu", "disk"]


class DeepSpeedOptions(Section):
    """options.deepspeed; what DeepSpeed calls a setting stands behind its own."""

    buckets: Literal["scaled", "library"] = "scaled"
    """scaled: a sixteenth of the model's parameters, from 65,536 to 5e8; library: DeepSpeed's own 5e8 elements,
    which outweigh a small model many times. The seven sizes below follow it where they are not given."""

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
    """What is used again within so many elements stays whole (`stage3_max_reuse_distance`); `parameters`. scaled: 0."""

    overlap: bool | None = None
    """Reduce while the backward goes on (`overlap_comm`); null: as DeepSpeed decides. Needs CUDA's streams."""

    contiguous: bool = True
    """Copy gradients into one buffer as they come (`contiguous_gradients`)."""

    offload_optimizer: OffloadDevice = "none"
    """Where masters and moments live and are updated (`offload_optimizer.device`): cpu, or disk (`nvme`)."""

    offload_parameters: OffloadDevice = "none"
    """Where split parameters wait for their use (`offload_param.device`): cpu, or disk (`nvme`); `parameters`."""

    offload_to: str | None = None
    """The folder on the disk (`nvme_path`); what is written there goes with the run, but for empty folders."""

    cpu_adam: Literal["library", "torch"] = "library"
    """Who updates what was offloaded: DeepSpeed's CPU Adam, compiled once (a minute), or PyTorch's optimizer."""


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
    """Its options, and what model.offload means among them."""
    return DeepSpeedOptions.model_validate(_neutral_offload(config) | config.options.get("deepspeed", {}))


def _neutral_offload(config: Config) -> dict[str, OffloadDevice]:
    """What model.offload asks for, in our options."""
    if config.model.offload == "none":
        return {}
    return {
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu" if config.model.offload == "parameters" else "none",
    }


def zero_settings(config: Config, parameters: int | None) -> dict[str, Any]:
    """What stands under `zero_optimization`."""
    stage, options = SHARDS.index(config.parallel.shard), options_of(config)
    told: dict[str, Any] = {"stage": stage}
    if stage == 3:
        told["memory_efficient_linear"] = False  # it patches the whole process
    for name in SIZES_OF_STAGE[stage]:
        given = getattr(options, name)
        size = options.buckets if given is None else given
        if size != "library":
            told[DS_KEY_OF_SIZE[name]] = _scaled_size(name, parameters) if size == "scaled" else size
    if stage and options.overlap is not None:
        told["overlap_comm"] = options.overlap
    if stage and not options.contiguous:
        told["contiguous_gradients"] = False
    for key, device in (
        ("offload_optimizer", options.offload_optimizer),
        ("offload_param", options.offload_parameters),
    ):
        if device != "none":
            told[key] = {"device": "nvme" if device == "disk" else device, "pin_memory": _has_cuda(config)}
            if device == "disk":
                told[key]["nvme_path"] = str(Path(options.offload_to or "").resolve())
    return told


def remove_offload_files(config: Config, ranks: Iterable[int]) -> None:
    """Remove what these ranks have on the disk."""
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
        return "parameters // 16, from 65,536 to 5e8" + (f", times {times}" if times > 1 else "")
    return times * min(max(parameters // 16, 65_536), 500_000_000)


def _has_cuda(config: Config) -> bool:
    return resources.choose_device(config)[0] != "cpu"


def deepspeed_option_refusals(config: Config) -> Iterator[str]:
    """Each option that would be without effect in this cell, or cannot be had."""
    stage, options = SHARDS.index(config.parallel.shard), options_of(config)
    own = DeepSpeedOptions.model_validate(config.options.get("deepspeed", {}))
    here = f"parallel.shard: {config.parallel.shard}"
    given = {name: value for name, value in own.model_dump(exclude_defaults=True).items() if value is not None}
    if stage == 0:
        for name, value in given.items():
            yield f"options.deepspeed.{name}: {_value_text(value)} has no effect, as nothing is split; leave it out"
        return
    for name in given:
        if name in DS_KEY_OF_SIZE and name not in SIZES_OF_STAGE[stage]:
            yield f"options.deepspeed.{name}: {_value_text(given[name])} has no effect with {here}; leave it out"
    for name in ("reduce", "gather", "live"):
        if given.get(name) == 0:
            yield f"options.deepspeed.{name}: 0 elements would never be enough; give a number above 0"
    if options.overlap is not None and not _has_cuda(config):
        yield "options.deepspeed.overlap has no effect on the CPU, which has no streams; leave it out"
    yield from _offload_refusals(config, options, stage)


def _offload_refusals(config: Config, options: DeepSpeedOptions, stage: int) -> Iterator[str]:
    optimizer, parameters, neutral = options.offload_optimizer, options.offload_parameters, config.model.offload
    for name, wanted in _neutral_offload(config).items():
        if (said := getattr(options, name)) != wanted:
            yield (
                f"options.deepspeed.{name}: {said} contradicts model.offload: {neutral}, which is {name}: {wanted}; "
                "leave one of them out"
            )
    asked = f"options.deepspeed.offload_parameters: {parameters}" if neutral == "none" else f"model.offload: {neutral}"
    disk = "disk" in (optimizer, parameters)
    if parameters != "none" and stage < 3:
        yield (f"{asked} needs parallel.shard: parameters, as {config.parallel.shard} leaves them whole on every rank")
    told = neutral != "none" and config.device == "cpu"  # for every backend
    if parameters == "cpu" and not _has_cuda(config) and not told:
        yield f"{asked} has no effect on the CPU, where they are; leave it out"
    if optimizer == "disk" and stage < 3:
        yield (
            "options.deepspeed.offload_optimizer: disk needs parallel.shard: parameters (DeepSpeed takes it for cpu "
            f"with {config.parallel.shard}); say cpu"
        )
    if disk and options.offload_to is None:
        yield "options.deepspeed: disk needs a folder, offload_to: /path/on/that/disk"
    if disk and not _has_libaio():
        yield "options.deepspeed: disk needs libaio, which is not here: apt install libaio-dev, or say cpu"
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
        yield "train.clip: the fp64 norm cannot be had of gradients that are offloaded; leave norm out"
    if optimizer == "disk" and config.train.precision == "bf16-master":
        yield "train.precision: bf16-master cannot be had with offload_optimizer: disk, whose masters are out; say cpu"
    if optimizer == "disk" and isinstance(config.train.optimizer, SGD):
        yield "options.deepspeed.offload_optimizer: disk is for adam and adamw, whose moments it swaps; say cpu"


def _has_libaio() -> bool:
    header = any((Path(folder) / "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    return header and ctypes.util.find_library("aio") is not None


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
