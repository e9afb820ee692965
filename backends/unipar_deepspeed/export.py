"""Export of a script for DeepSpeed alone, with a ds_config.json that holds all settings that it has keys for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unipar.backend.export import (
    Outline,
    Script,
    fill_template,
    format_call,
    format_json,
    has_schedule,
    learning_rate_scale,
    optimizer_class_name,
    refuse_uncarried_options,
    sample_files,
)
from unipar.config import SHARDS
from unipar.errors import Unsupported
from unipar_deepspeed import backend

_CARRIED_OPTIONS = frozenset({"buckets"})


def script(outline: Outline) -> Script:
    """Return the script's files and command; raise Unsupported for what DeepSpeed's script cannot carry."""
    config = outline.config
    precision, stage = config.train.precision, SHARDS.index(config.parallel.shard)
    strategy = f"deepspeed/{config.parallel.shard}"
    refuse_uncarried_options("deepspeed", strategy, config.options.get("deepspeed", {}), _CARRIED_OPTIONS)
    if config.parallel.axes.split:
        raise Unsupported(
            strategy,
            [
                f"parallel ({config.parallel.axes}): unipar finds the partition_config of DeepSpeed's AutoTP or the "
                "layers of AutoEP when a run starts, and adapts calls and names, which a plain script cannot; leave "
                f"{' and '.join(config.parallel.axes.sizes)} out"
            ],
        )
    if precision == "fp64":
        raise Unsupported(strategy, ["train.precision: a ds_config.json has no key for fp64; use fp32"])
    if precision == "bf16-master" and stage == 0:
        raise Unsupported(
            strategy,
            [
                "train.precision: bf16-master without sharding takes a step of its own while DeepSpeed starts, which a "
                "plain script cannot undo; shard something: --set parallel.shard=optimizer"
            ],
        )
    outline = replace(outline, autocast=precision == "bf16-mixed")
    words = ["model=Loss(task, model)", "model_parameters=groups", 'config="ds_config.json"']
    words += ["lr_scheduler=schedule"] * has_schedule(config)
    values = {"stage": str(stage), "initialize": format_call("    engine, _, _, _ = deepspeed.initialize", words)}
    train = fill_template(
        outline, "unipar_deepspeed", "train.txt", {"norm": bool(stage) and config.train.clip is not None}, values
    )
    files = {
        "train.py": train,
        **sample_files(outline),
        "ds_config.json": format_json(build_ds_config(outline)),
    }
    command = ["deepspeed", "--num_gpus", str(outline.sizes.ranks), "$@", "train.py"]
    return Script(files, command, {} if outline.cuda else {"DS_ACCELERATOR": "cpu"})


def build_ds_config(outline: Outline) -> dict[str, Any]:
    """Return the ds_config.json: real batch sizes, and the optimizer, which DeepSpeed creates itself in a script."""
    config, sizes = outline.config, outline.sizes
    settings = config.train.optimizer.arguments("cuda" if outline.cuda else "cpu")
    params: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    params["lr"] *= learning_rate_scale(outline)
    kind = optimizer_class_name(config)
    if kind in ("Adam", "AdamW"):
        params["torch_adam"] = True
    if kind == "Adam":
        params["adam_w_mode"] = False  # its Adam is AdamW otherwise
    ds_config = backend.native_config(config, outline.parameters)
    clip = config.train.clipping
    micro = sizes.micro if sizes.tokens is None else 1  # DeepSpeed counts samples, of which these have any number
    ds_config |= {
        "train_batch_size": micro * sizes.steady_accumulate * sizes.ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": sizes.steady_accumulate,
        "gradient_clipping": 0.0 if clip is None else float(clip.max),
        "optimizer": {"type": kind, "params": params},
    }
    return dict(sorted(ds_config.items(), key=lambda item: (isinstance(item[1], dict), item[0])))
