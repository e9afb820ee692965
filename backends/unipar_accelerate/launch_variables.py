"""Comparison of the config with Accelerate's variables, which `accelerate launch` sets from flags and a yaml."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from unipar.config import SHARDS, Config
from unipar.errors import ConfigError

_LAUNCH_WAS_TOLD = "accelerate launch was told"
_BF16_WORDS = {"bf16-mixed": "bf16", "bf16-master": "bf16", "fp16": "fp16"}
_TRUE_WORDS = ("true", "1", "yes")


def find_contradictions(config: Config, through: str, word: str | None) -> Iterator[str]:
    """Yield a sentence for each variable that contradicts the config, whoever set it.

    `through` is the library that the strategy shards with, `word` Accelerate's name of the precision; None: Accelerate
    does not train it, so that "no", which `accelerate launch` always sets, says nothing.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    for sentence in _contradictions(config, through, word, os.environ):
        yield sentence if launched else sentence.replace(_LAUNCH_WAS_TOLD, "Accelerate's variables here say", 1)


def _contradictions(config: Config, through: str, word: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    variables = LaunchVariables(environ)
    theirs = environ.get("ACCELERATE_MIXED_PRECISION")
    if word is None:
        word = _BF16_WORDS.get(config.train.precision, "no")
        theirs = None if theirs == "no" else theirs
    if theirs is not None and theirs != word:
        yield _contradiction(
            "mixed_precision", theirs, f"train.precision: {config.train.precision}", f"which is {word} there"
        )
    if (dynamo := environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")).upper() != "NO":
        ours = "unipar compiles as the config's model.compile says"
        yield f"{_LAUNCH_WAS_TOLD} dynamo_backend: {dynamo}, and {ours}; leave it out there"
    if variables.on("ACCELERATE_USE_MEGATRON_LM"):
        yield f"{_LAUNCH_WAS_TOLD} MEGATRON_LM, which unipar does not support; leave it out there"
    if variables.on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        yield from _parallelism_contradictions(config, variables)
    if variables.on("ACCELERATE_USE_FSDP"):
        yield from _fsdp_contradictions(config, through, variables)
    if variables.on("ACCELERATE_USE_DEEPSPEED"):
        yield from _deepspeed_contradictions(config, through, variables)
    if not variables.word("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        yield from _accumulation_contradictions(config, variables)


def _parallelism_contradictions(config: Config, variables: LaunchVariables) -> Iterator[str]:
    axes, data = config.parallel.axes, config.parallel.data
    if not axes.split:
        ours = "the config says neither parallel.tensor nor parallel.context"
        yield f"{_LAUNCH_WAS_TOLD} a parallelism_config, and {ours}; leave it out there"
        return
    if data == "auto":
        data = int(variables.environ.get("WORLD_SIZE", "1")) // axes.ranks
    sizes = {"tp_size": ("tensor", axes.tensor), "cp_size": ("context", axes.context), "dp_shard_size": ("data", data)}
    for theirs, (key, size) in sizes.items():
        value = variables.environ.get(f"PARALLELISM_CONFIG_{theirs.upper()}", "1")
        if value != str(size):
            ours = f"parallel.{key}: {size}"
            yield _contradiction(f"parallelism_config_{theirs}", value, ours, f"which is {theirs}: {size} there")
    for theirs in ("dp_replicate_size", "sp_size"):
        if (value := variables.environ.get(f"PARALLELISM_CONFIG_{theirs.upper()}", "1")) != "1":
            yield f"{_LAUNCH_WAS_TOLD} parallelism_config_{theirs}: {value}, which unipar does not support; say 1 there"


class LaunchVariables:
    """Variables that `accelerate launch` has set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def on(self, variable: str) -> bool:
        return self.environ.get(variable, "").lower() in _TRUE_WORDS

    def word(self, variable: str) -> str:
        """Return the variable's value; "" where it is not set, none or auto."""
        text = self.environ.get(variable, "")
        return "" if text.lower() in ("none", "auto") else text


def _contradiction(key: str, theirs: str, ours: str, way: str) -> str:
    return f"{_LAUNCH_WAS_TOLD} {key}: {theirs}, and the config says {ours}, {way}; change one of them"


def _shard_text(config: Config, through: str) -> str:
    return f"parallel.shard: {config.parallel.shard}" + (f" through {through}" if through else "")


def _fsdp_contradictions(config: Config, through: str, variables: LaunchVariables) -> Iterator[str]:
    if through != "FSDP2":
        yield _contradiction("distributed_type", "FSDP", _shard_text(config, through), "which is not FSDP")
        return
    if (version := variables.environ.get("FSDP_VERSION", "1")) != "2":
        yield f"{_LAUNCH_WAS_TOLD} fsdp_version: {version}, but unipar supports FSDP2 only; set fsdp_version: 2 there"
    reshard = variables.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if reshard != ("true" if config.parallel.shard == "parameters" else "false"):
        way = "which is true for parameters and false for gradients"
        yield _contradiction("fsdp_reshard_after_forward", reshard, _shard_text(config, ""), way)
    if variables.on("FSDP_OFFLOAD_PARAMS"):
        yield _contradiction("fsdp_offload_params", "true", "nothing about it", "so parameters stay on the device")
    if variables.on("FSDP_ACTIVATION_CHECKPOINTING"):
        yield _contradiction(
            "fsdp_activation_checkpointing", "true", "nothing about it", "as unipar's key for it is model.recompute"
        )


def _deepspeed_contradictions(config: Config, through: str, variables: LaunchVariables) -> Iterator[str]:
    if through != "DeepSpeed":
        yield _contradiction("distributed_type", "DEEPSPEED", _shard_text(config, through), "which is not DeepSpeed")
        return
    if file := variables.word("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        yield (
            f"{_LAUNCH_WAS_TOLD} deepspeed_config_file: {file}, whose settings are not read here; "
            "set them in options.deepspeed, and leave it out there"
        )
        return
    stage = variables.word("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage and stage != str(SHARDS.index(config.parallel.shard)):
        way = f"which is zero_stage {SHARDS.index(config.parallel.shard)}"
        yield _contradiction("zero_stage", stage, f"parallel.shard: {config.parallel.shard}", way)
    clip = variables.word("ACCELERATE_GRADIENT_CLIPPING")
    limit = config.train.clipping
    if clip and (limit is None or float(clip) != limit.max):
        shown = "no train.clip" if limit is None else f"train.clip: {limit.max:g}"
        yield _contradiction("gradient_clipping", clip, shown, "which would take precedence")
    options = config.options.get("deepspeed", {})
    for variable, key, theirs in (
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer", "offload_optimizer_device"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_parameters", "offload_param_device"),
    ):
        wanted = variables.environ.get(variable, "none").replace("nvme", "disk")
        if wanted != (mine := options.get(key, "none")):
            shown = f"options.deepspeed.{key}: {mine}"
            yield _contradiction(theirs, variables.environ[variable], shown, "which would take precedence")


def _accumulation_contradictions(config: Config, variables: LaunchVariables) -> Iterator[str]:
    accumulate = variables.word("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if not accumulate and "ACCELERATE_MIXED_PRECISION" in variables.environ:
        accumulate = _argument_of_launch("--gradient_accumulation_steps")
    if not accumulate or config.batch.is_auto:
        return
    ours = _accumulation_steps(config, variables)
    if ours is not None and accumulate != str(ours):
        why = f"batch: {ours} microbatches a step"
        yield _contradiction(
            "gradient_accumulation_steps", accumulate, why, f"which is gradient_accumulation_steps: {ours}"
        )


def _argument_of_launch(name: str) -> str:
    """Return an argument of the `accelerate launch` that started this process; "" if it was not given.

    Without DeepSpeed it sets no variable for the steps of accumulation.
    """
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    names = (name, name.replace("_", "-"))
    for word, following in zip(words, [*words[1:], ""], strict=True):
        head, equals, value = word.partition("=")
        if head in names:
            return value if equals else following
    return ""


def _accumulation_steps(config: Config, variables: LaunchVariables) -> int | None:
    """Return the microbatches of a step on each rank, on the ranks of the config or else of the launcher."""
    ranks = config.parallel.data
    try:
        if ranks == "auto":
            ranks = int(variables.environ.get("WORLD_SIZE", "1")) // config.parallel.axes.ranks
        return config.batch.settle(ranks).accumulate
    except (ConfigError, ValueError):  # another check refuses such a batch
        return None
