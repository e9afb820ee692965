"""Export of a script for Accelerate alone over DDP, with the accelerate.yaml that starts it."""

from __future__ import annotations

from dataclasses import replace

from unipar.backend.export import (
    Outline,
    Script,
    fill_template,
    format_call,
    refuse_uncarried_options,
    sample_files,
)
from unipar.errors import Unsupported
from unipar_accelerate import options_of

_CARRIED_OPTIONS = frozenset({"find_unused_parameters"})


def script(outline: Outline) -> Script:
    """Return the script's files and command; raise Unsupported for what Accelerate's script cannot carry."""
    config = outline.config
    strategy = f"accelerate/{config.parallel.shard}"
    if config.parallel.shard != "nothing":
        raise Unsupported(
            strategy,
            [
                "scripts for Accelerate over FSDP2 or DeepSpeed are not supported; export to those directly: "
                "--to torchrun (FSDP2), or --to deepspeed (ZeRO)"
            ],
        )
    refuse_uncarried_options("accelerate", strategy, config.options.get("accelerate", {}), _CARRIED_OPTIONS)
    unused = options_of(config).find_unused_parameters is True
    if unused:
        raise Unsupported(
            strategy, ["options.accelerate.find_unused_parameters: true is not carried into a script; leave it out"]
        )
    kwargs = "kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]"
    words = ["cpu=True"] * (not outline.cuda)
    words += [f"gradient_accumulation_steps={outline.sizes.steady_accumulate}"] * (outline.sizes.steady_accumulate > 1)
    values = {"accelerator": format_call("    accelerator = Accelerator", [*words, kwargs])}
    train = fill_template(replace(outline, autocast=False), "unipar_accelerate", "train.txt", {"kwargs": True}, values)
    train = train.replace(".to(device)", "")  # prepare() moves the model
    files = {
        "train.py": train,
        **sample_files(outline),
        "accelerate.yaml": _accelerate_yaml(outline),
    }
    command = ["accelerate", "launch", "--config_file", "accelerate.yaml", "$@", "train.py"]
    return Script(files, command)


def _accelerate_yaml(outline: Outline) -> str:
    ranks = outline.sizes.ranks
    mixed = "bf16" if outline.config.train.precision == "bf16-mixed" else "no"
    lines = ["compute_environment: LOCAL_MACHINE"]
    if ranks > 1 and not outline.cuda:
        lines.append("# MULTI_CPU would start one process; MULTI_GPU starts them all, and the script says cpu=True")
    lines += [
        f"distributed_type: '{'MULTI_GPU' if ranks > 1 else 'NO'}'",
        "num_machines: 1",
        f"num_processes: {ranks}",
        f"mixed_precision: '{mixed}'",
        f"use_cpu: {str(ranks == 1 and not outline.cuda).lower()}",
    ]
    return "\n".join([*lines, ""])
