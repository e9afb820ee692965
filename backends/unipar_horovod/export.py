"""A script for Horovod alone, started by horovodrun."""

from __future__ import annotations

from dataclasses import replace

from unipar.backend.export import Outline, Script, call, refuse_options, samples, written
from unipar_horovod import fusion, options_of

_CARRIED = frozenset({"buckets", "fusion_mb", "compression"})


def script(outline: Outline) -> Script:
    config = outline.config
    refuse_options("horovod", "horovod/nothing", config.options.get("horovod", {}), _CARRIED)
    options = options_of(config)
    outline = replace(outline, autocast=config.train.precision == "bf16-mixed")
    words = ["optimizer", "named_parameters=named"]
    if options.compression == "fp16":
        words.append("compression=hvd.Compression.fp16")
    if outline.sizes.accumulate > 1:
        words.append(f"backward_passes_per_step={outline.sizes.accumulate}")
    wrap = call("    optimizer = hvd.DistributedOptimizer", words)
    files = {
        "train.py": written(outline, "unipar_horovod", "train.txt", {}, {"wrap": wrap}),
        "samples.py": samples(outline),
    }
    ranks = str(outline.sizes.ranks)
    command = ["horovodrun", "--gloo", "-np", ranks, "-H", f"localhost:{ranks}"]
    mib = int(fusion(config, outline.parameters)) // 2**20
    command += ["--fusion-threshold-mb", str(mib), "$@", "python", "train.py"]
    return Script(files, command)
