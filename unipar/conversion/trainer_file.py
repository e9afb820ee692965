"""Import of a trainer's own file: training arguments, and the library's config or the split that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unipar.backend import Backend, registry
from unipar.backend.foreign import ForeignConfigReader, ForeignSection
from unipar.conversion.given_arguments import knows_argument
from unipar.errors import ConfigError
from unipar.utils.text import show_value

READ_HERE = frozenset(
    {
        *("fsdp", "fsdp_config", "fsdp_version", "dist_config", "parallelism_config"),
        *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"),
        *("sequence_parallel_size", "ulysses_sequence_parallel_size"),
        *("dp_shard_size", "dp_replicate_size"),
    }
)
"""Arguments that say how ranks share the work."""

_SHARD_OF_WORD = {"full_shard": "parameters", "shard_grad_op": "gradients", "no_shard": "nothing"}
_ENOUGH = 3
"""Arguments by which a file is known as a trainer's."""

Load = Callable[[Path], Mapping[str, Any]]
"""Function that reads a file's keys."""

Choose = Callable[[Path, Mapping[str, Any]], Backend]
"""Function that finds the backend which imports these keys."""


def is_trainer_file(data: Mapping[str, Any], others: int) -> bool:
    """Return whether a file holds training arguments rather than keys of a library, of which it has so many."""
    known = sum(knows_argument(name) for name in data if not isinstance(data[name], dict))
    return known >= _ENOUGH and known > others


def read_trainer_file(
    reading: ForeignConfigReader, data: Mapping[str, Any], load: Load, choose: Choose
) -> Backend | None:
    """Carry what splits the work; return the backend that imports the config which the file names, if it names one."""
    reading.read.update(name for name in data if knows_argument(name))
    for above in ("lr_scheduler_kwargs", "optim_config"):
        if isinstance(details := data.get(above), dict):
            reading.read.update(f"{above}.{name}" for name in details)
    libraries = library_arguments()
    keys = reading.section({name: value for name, value in data.items() if name in READ_HERE | libraries})
    for library in libraries & keys.data.keys():
        if isinstance(section := keys.data[library], dict) and section:
            return _read_library_of(keys, library, "", load, choose)
        if named := keys.take(library, str, ""):
            return _read_library_of(keys, library, named, load, choose)
    mesh = keys.below("dist_config")
    kind = mesh.take("name", str, "").lower()
    mesh.leave_rest("unipar saves and splits in its own way")
    _read_shards(keys, kind)
    _read_axes(keys)
    if not reading.answered("batch.total"):
        reading.ask("per_device_train_batch_size", "batch.micro", "4")
        reading.ask("gradient_accumulation_steps", "batch.accumulate", "1")
    reading.ask_optimizer("learning_rate")
    if "train.optimizer" not in reading.overrides:
        reading.assume("train.clip")
    if reading.answers and (wanted := reading.answers.precision):
        master = wanted == "bf16" and reading.config.get("parallel.shard") in ("gradients", "parameters")
        alone = all(f"parallel.{axis}" not in reading.config for axis in ("tensor", "context"))
        meaning = "fp16" if wanted == "fp16" else "bf16-master" if master and alone else "bf16-mixed"
        reading.put("train.precision", meaning, reading.answers.precision_why)
    return None


def library_arguments() -> frozenset[str]:
    """Return the arguments that name a library's config: the names of the backends that import one."""
    return frozenset(name for name in registry.backend_names() if registry.find_backend(name).imports)


def _read_library_of(keys: ForeignSection, library: str, named: str, load: Load, choose: Choose) -> Backend:
    """Carry the library's config that the arguments name, hold, or mean by a stage such as `zero2_offload`."""
    reading = keys.reading
    path = reading.locate(named) if _is_path(named) else reading.folder / named
    if not named:
        inner = keys.take(library, dict, {})
    else:
        inner = load(path) if _is_path(named) else _config_of_stage(reading, library, named)
    keys.leave_rest(f"{library} says it")
    backend = choose(path, inner)
    backend.read_foreign(reading, inner)
    return backend


def _is_path(named: str) -> bool:
    return named.endswith((".json", ".yaml", ".yml"))


def _config_of_stage(reading: ForeignConfigReader, library: str, named: str) -> Mapping[str, Any]:
    """Return the config that tools keep under a name such as `zero3_offload`."""
    word, _, more = named.partition("_")
    stage = word.removeprefix("zero")
    if stage not in ("0", "1", "2", "3") or more not in ("", "offload"):
        raise ConfigError(
            f"{reading.label}: {library}: {show_value(named)} is neither a .json file nor one of zero0 to zero3; "
            "import the file that it stands for, with --args and this one"
        )
    zero: dict[str, Any] = {"stage": int(stage)}
    if more:
        zero["offload_optimizer"] = {"device": "cpu"}
    if more and stage == "3":
        zero["offload_param"] = {"device": "cpu"}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        **dict.fromkeys(auto, "auto"),
    }


def _read_shards(keys: ForeignSection, kind: str) -> None:
    reading = keys.reading
    fsdp: Any = keys.data.pop("fsdp", None)
    reading.read.add("fsdp")
    words = fsdp.split() if isinstance(fsdp, str) else [str(word) for word in fsdp] if isinstance(fsdp, list) else []
    options = {name.removeprefix("fsdp_"): value for name, value in keys.take("fsdp_config", dict, {}).items()}
    reading.read.update(f"fsdp_config.{name}" for name in options)
    split = bool(words) or fsdp is True or bool(options.keys() - _OPTIONS_OF_ALL) or kind.startswith("fsdp")
    split = split or keys.data.get("fsdp_version") is not None or _size(keys, "dp_shard_size") > 1
    shard = next((_SHARD_OF_WORD[word] for word in words if word in _SHARD_OF_WORD), "parameters")
    if options.get("reshard_after_forward") in (False, "false") or options.get("sharding_strategy") == "SHARD_GRAD_OP":
        shard = "gradients"
    for name in (f"fsdp_config.{name}" for name in options if name not in _OPTIONS_READ):
        reading.omit(name, "FSDP2 does it in its own way")
    keys.omit({"fsdp_version": "unipar uses FSDP2"})
    if not split:
        _assume_copies(reading)
        return
    reading.put("backend", "native", "FSDP2")
    reading.put("parallel.shard", shard, "fsdp")
    if any(word.startswith("hybrid_shard") for word in words):
        reading.put("parallel.shard_over", "machine", "fsdp: hybrid_shard")
    if "offload" in words or options.get("offload_params") is True or options.get("cpu_offload") is True:
        reading.put("model.offload", "parameters", "fsdp")
    if options.get("activation_checkpointing") is True:
        reading.put("model.recompute", "blocks", "fsdp_config.activation_checkpointing")


_OPTIONS_OF_ALL = {"min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}
"""Options that older versions of the Trainer save in `fsdp_config` when there is no FSDP."""

_OPTIONS_READ = (
    "reshard_after_forward",
    "sharding_strategy",
    "offload_params",
    "cpu_offload",
    "activation_checkpointing",
)


def _assume_copies(reading: ForeignConfigReader) -> None:
    why = "the file names no library: each rank has a copy of the model, as under torchrun"
    if not reading.assume_default("backend", "native", why):
        reading.ask("the library that the launcher says", "backend", "native")


def _size(keys: ForeignSection, name: str) -> int:
    value: Any = keys.data.get(name)
    return value if isinstance(value, int) else 1


def _read_axes(keys: ForeignSection) -> None:
    """Carry the sizes of axes along which ranks train on the same samples."""
    for name, axis in (
        ("tensor_parallel_size", "tensor"),
        ("context_parallel_size", "context"),
        ("sequence_parallel_degree", "context"),
        ("sequence_parallel_size", "context"),
        ("ulysses_sequence_parallel_size", "context"),
    ):
        if (size := keys.take(name, int, 1)) > 1:
            keys.reading.put(f"parallel.{axis}", size, name)
            if name.endswith("sequence_parallel_size"):  # of tools that trade positions for heads
                keys.reading.put("options.native.attention", "ulysses", name)
    over = _size(keys, "dp_shard_size")
    if over > 1 and _size(keys, "dp_replicate_size") > 1:
        keys.reading.put("parallel.shard_over", over, "dp_shard_size")
    keys.omit(dict.fromkeys(("dp_shard_size", "dp_replicate_size"), "parallel.shard and parallel.data say it"))
    if isinstance(keys.data.get("parallelism_config"), dict):
        keys.reading.refuse("parallelism_config", "it is carried from the launcher's config alone", "parallel")
