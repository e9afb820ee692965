"""Export of a script for Horovod alone, started by horovodrun."""

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
from unipar_horovod import fusion_buffer_bytes, options_of

_CARRIED_OPTIONS = frozenset({"buckets", "fusion_mb", "compression"})


def script(outline: Outline) -> Script:
    """Return the script's files and command; raise Unsupported for what Horovod's script cannot carry."""
    config = outline.config
    refuse_uncarried_options("horovod", "horovod/nothing", config.options.get("horovod", {}), _CARRIED_OPTIONS)
    options = options_of(config)
    outline = replace(outline, autocast=config.train.precision == "bf16-mixed")
    words = ["optimizer", "named_parameters=named"]
    if options.compression == "fp16":
        words.append("compression=hvd.Compression.fp16")
    if outline.sizes.steady_accumulate > 1:
        words.append(f"backward_passes_per_step={outline.sizes.steady_accumulate}")
    wrap = format_call("    optimizer = hvd.DistributedOptimizer", words)
    files = {
        "train.py": fill_template(outline, "unipar_horovod", "train.txt", {}, {"wrap": wrap}),
        **sample_files(outline),
    }
    ranks = str(outline.sizes.ranks)
    command = ["horovodrun", "--gloo", "-np", ranks, "-H", f"localhost:{ranks}"]
    mib = int(fusion_buffer_bytes(config, outline.parameters)) // 2**20
    command += ["--fusion-threshold-mb", str(mib), "$@", "python", "train.py"]
    return Script(files, command)
