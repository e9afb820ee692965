"""Scripts for PyTorch alone, started by torchrun: DistributedDataParallel, ZeroRedundancyOptimizer or FSDP2."""

from __future__ import annotations

from dataclasses import replace

from unipar.backend.export import (
    Outline,
    Script,
    call,
    groups,
    optimizer,
    optimizer_kind,
    optimizer_words,
    refuse_options,
    samples,
    written,
)
from unipar_native import ZERO_SETTINGS, options_of, replicated

_CARRIED = frozenset({"find_unused", "bucket_mb"})


def script(outline: Outline) -> Script:
    config = outline.config
    shard = config.parallel.shard
    refuse_options("native", f"native/{shard}", config.options.get("native", {}), _CARRIED)
    outline = replace(outline, autocast=config.train.precision == "bf16-mixed")
    text = _ddp(outline) if replicated(config) else _fsdp2(outline)
    command = ["torchrun", "--standalone", "--nproc-per-node", str(outline.sizes.ranks), "$@", "train.py"]
    return Script({"train.py": text, "samples.py": samples(outline)}, command)


def _ddp(outline: Outline) -> str:
    options = options_of(outline.config)
    words = ["Loss(task, model)", f"bucket_cap_mb={options.bucket_mb}", "gradient_as_bucket_view=True"]
    words += ["find_unused_parameters=True"] * (options.find_unused is True)
    wrap = call("    wrapped = DistributedDataParallel", words)
    zero = outline.config.parallel.shard == "optimizer"
    flags, values = {"unused": options.find_unused is True, "zero": zero}, {"wrap": wrap}
    if zero:
        told = [*optimizer_words(outline), *(f"{name}={value!r}" for name, value in ZERO_SETTINGS.items())]
        words = ["groups", f"torch.optim.{optimizer_kind(outline.config)}", *told]
        values["optimizer"] = call("    optimizer = ZeroRedundancyOptimizer", words)
        values["groups"] = groups(outline, listed=True)  # it goes through them twice
    return written(outline, "unipar_native", "ddp.txt", flags, values)


def _fsdp2(outline: Outline) -> str:
    shard, master = outline.config.parallel.shard, outline.config.train.precision == "bf16-master"
    words = ['"mesh": init_device_mesh(device.type, (ranks,))', f'"reshard_after_forward": {shard == "parameters"}']
    if master:
        words.append('"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)')
    held = f"    split: dict[str, Any] = {{{', '.join(words)}}}"
    if len(held) > 120:
        held = "\n".join(["    split: dict[str, Any] = {", *(f"        {word}," for word in words), "    }"])
    flags = {"blocks": bool(outline.blocks), "boundary": shard == "optimizer"}
    values = {
        "shard": held,
        "blocks": _blocks(outline.blocks),
        "optimizer": optimizer(outline, split=True),
        "lower": _LOWER if master else "",
    }
    return written(outline, "unipar_native", "fsdp2.txt", flags, values)


def _blocks(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    quoted = [f'"{name}"' for name in names]
    tail = "," * (len(names) == 1)
    one = f"BLOCKS = ({', '.join(quoted)}{tail})  # of the model, split one by one"
    return one if len(one) <= 120 else "\n".join(["BLOCKS = (", *(f"    {word}," for word in quoted), ")"])


_LOWER = '''def constants_to_bf16(model: nn.Module) -> None:
    """Buffers compute with parameters, so they are bf16 as well; running statistics stay fp32."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.bfloat16())


'''
