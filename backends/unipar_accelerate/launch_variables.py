"""What `accelerate launch` and the user's own yaml say of a run, by variables, held against the config."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from unipar.config import SHARDS, Config
from unipar.distributed.launchers import Launcher, find_launcher
from unipar.errors import ConfigError

_LAUNCH_WAS_TOLD = "accelerate launch was told"
_TRUE_WORDS = ("true", "1", "yes")


def find_contradictions(
    config: Config, through: str, word: str, launchers: tuple[Launcher, ...], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """A sentence for each; `through` is what the cell splits with, `word` Accelerate's for the precision."""
    launcher = find_launcher(launchers, environ)
    if launcher is None or launcher.refusal:
        return
    said = LaunchVariables(environ)
    if (theirs := environ.get("ACCELERATE_MIXED_PRECISION", "no")) != word:
        yield _contradiction(
            "mixed_precision", theirs, f"train.precision: {config.train.precision}", f"which is {word} there"
        )
    if (dynamo := environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")).upper() != "NO":
        ours = "unipar compiles as the config's model.compile says"
        yield f"{_LAUNCH_WAS_TOLD} dynamo_backend: {dynamo}, and {ours}; leave it out there"
    for variable, key in (("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM"), ("ACCELERATE_USE_PARALLELISM_CONFIG", "")):
        if said.on(variable):
            yield f"{_LAUNCH_WAS_TOLD} {key or 'a parallelism_config'}, which unipar has not; leave it out there"
    if said.on("ACCELERATE_USE_FSDP"):
        yield from _fsdp_contradictions(config, through, said)
    if said.on("ACCELERATE_USE_DEEPSPEED"):
        yield from _deepspeed_contradictions(config, through, said)


class LaunchVariables:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def on(self, variable: str) -> bool:
        return self.environ.get(variable, "").lower() in _TRUE_WORDS

    def word(self, variable: str) -> str:
        """Empty where nothing was said."""
        text = self.environ.get(variable, "")
        return "" if text.lower() in ("none", "auto") else text


def _contradiction(key: str, theirs: str, ours: str, way: str) -> str:
    return f"{_LAUNCH_WAS_TOLD} {key}: {theirs}, and the config says {ours}, {way}; change one of them"


def _shard_text(config: Config, through: str) -> str:
    return f"parallel.shard: {config.parallel.shard}" + (f" through {through}" if through else "")


def _fsdp_contradictions(config: Config, through: str, said: LaunchVariables) -> Iterator[str]:
    if through != "FSDP2":
        yield _contradiction("distributed_type", "FSDP", _shard_text(config, through), "which is not FSDP")
        return
    if (version := said.environ.get("FSDP_VERSION", "1")) != "2":
        yield f"{_LAUNCH_WAS_TOLD} fsdp_version: {version}, and unipar has FSDP2 alone; say fsdp_version: 2 there"
    reshard = said.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if reshard != ("true" if config.parallel.shard == "parameters" else "false"):
        way = "which is true for parameters and false for gradients"
        yield _contradiction("fsdp_reshard_after_forward", reshard, _shard_text(config, ""), way)
    if said.on("FSDP_OFFLOAD_PARAMS"):
        yield _contradiction("fsdp_offload_params", "true", "nothing of it", "so all stays on the device")
    if said.on("FSDP_ACTIVATION_CHECKPOINTING"):
        yield _contradiction(
            "fsdp_activation_checkpointing", "true", "nothing of it", "as model.recompute is unipar's key for it"
        )


def _deepspeed_contradictions(config: Config, through: str, said: LaunchVariables) -> Iterator[str]:
    if through != "DeepSpeed":
        yield _contradiction("distributed_type", "DEEPSPEED", _shard_text(config, through), "which is not DeepSpeed")
        return
    if file := said.word("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        yield (
            f"{_LAUNCH_WAS_TOLD} deepspeed_config_file: {file}, whose settings are not read here; "
            "say them in options.deepspeed, and leave it out there"
        )
        return
    stage = said.word("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage and stage != str(SHARDS.index(config.parallel.shard)):
        way = f"which is zero_stage {SHARDS.index(config.parallel.shard)}"
        yield _contradiction("zero_stage", stage, f"parallel.shard: {config.parallel.shard}", way)
    accumulate = said.word("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    ours = _accumulation_steps(config, said)
    if accumulate and ours is not None and accumulate != str(ours):
        why = f"batch: {ours} microbatches a step"
        yield _contradiction(
            "gradient_accumulation_steps", accumulate, why, f"which is gradient_accumulation_steps: {ours}"
        )
    clip = said.word("ACCELERATE_GRADIENT_CLIPPING")
    limit = config.train.clipping
    if clip and (limit is None or float(clip) != limit.max):
        shown = "no train.clip" if limit is None else f"train.clip: {limit.max:g}"
        yield _contradiction("gradient_clipping", clip, shown, "which would win")
    options = config.options.get("deepspeed", {})
    for variable, key, theirs in (
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer", "offload_optimizer_device"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_parameters", "offload_param_device"),
    ):
        wanted = said.environ.get(variable, "none").replace("nvme", "disk")
        if wanted != (mine := options.get(key, "none")):
            yield _contradiction(theirs, said.environ[variable], f"options.deepspeed.{key}: {mine}", "which would win")


def _accumulation_steps(config: Config, said: LaunchVariables) -> int | None:
    try:
        return config.batch.settle(int(said.environ.get("WORLD_SIZE", "1"))).accumulate
    except (ConfigError, ValueError):  # said elsewhere, with its own way out
        return None
