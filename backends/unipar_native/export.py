"""Export of scripts for PyTorch alone, started by torchrun: DDP, ZeroRedundancyOptimizer or FSDP2."""

from __future__ import annotations

from dataclasses import replace

from unipar_mesh.scripts.mesh_script import mesh_script

from unipar.backend.export import (
    Outline,
    Script,
    constant_tuple,
    fill_template,
    format_call,
    groups_code,
    optimizer_class_name,
    optimizer_code,
    optimizer_words,
    refuse_uncarried_options,
    sample_files,
)
from unipar.backend.torch_libraries import uses_ddp
from unipar_native import ZERO_OPTIMIZER_SETTINGS, options_of

_CARRIED_OPTIONS = frozenset({"find_unused_parameters", "bucket_cap_mb", "vocabulary", "attention"})


def script(outline: Outline) -> Script:
    """Return the script's files and command; raise Unsupported for options that a script cannot carry."""
    config = outline.config
    shard = config.parallel.shard
    refuse_uncarried_options("native", f"native/{shard}", config.options.get("native", {}), _CARRIED_OPTIONS)
    outline = replace(outline, autocast=config.train.precision == "bf16-mixed")
    axes = config.parallel.axes
    write = mesh_script if axes.split else _ddp_script if uses_ddp(config) else _fsdp2_script
    command = ["torchrun", "--standalone", "--nproc-per-node", str(outline.sizes.ranks * axes.ranks), "$@", "train.py"]
    return Script({**write(outline), **sample_files(outline)}, command)


def _ddp_script(outline: Outline) -> dict[str, str]:
    options = options_of(outline.config)
    words = ["Loss(task, model)", f"bucket_cap_mb={options.bucket_cap_mb}", "gradient_as_bucket_view=True"]
    words += ["find_unused_parameters=True"] * (options.find_unused_parameters is True)
    wrap = format_call("    wrapped = DistributedDataParallel", words)
    zero = outline.config.parallel.shard == "optimizer"
    flags, values = {"unused": options.find_unused_parameters is True, "zero": zero}, {"wrap": wrap}
    if zero:
        more = [*optimizer_words(outline), *(f"{name}={value!r}" for name, value in ZERO_OPTIMIZER_SETTINGS.items())]
        words = ["groups", f"torch.optim.{optimizer_class_name(outline.config)}", *more]
        values["optimizer"] = format_call("    optimizer = ZeroRedundancyOptimizer", words)
        values["groups"] = groups_code(outline, listed=True)  # a list: ZeroRedundancyOptimizer iterates twice
    return {"train.py": fill_template(outline, "unipar_native", "ddp.txt", flags, values)}


def _fsdp2_script(outline: Outline) -> dict[str, str]:
    shard, master = outline.config.parallel.shard, outline.config.train.precision == "bf16-master"
    words = ['"mesh": init_device_mesh(device.type, (ranks,))', f'"reshard_after_forward": {shard == "parameters"}']
    if master:
        words.append('"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)')
    settings = f"    split: dict[str, Any] = {{{', '.join(words)}}}"
    if len(settings) > 120:
        settings = "\n".join(["    split: dict[str, Any] = {", *(f"        {word}," for word in words), "    }"])
    quoted = [f'"{name}"' for name in outline.blocks]
    flags = {"blocks": bool(outline.blocks), "boundary": shard == "optimizer"}
    values = {
        "shard": settings,
        "blocks": constant_tuple("BLOCKS", quoted, "submodules of the model, sharded one by one"),
        "optimizer": optimizer_code(outline, split=True),
        "lower": _CAST_BUFFERS_CODE if master else "",
    }
    return {"train.py": fill_template(outline, "unipar_native", "fsdp2.txt", flags, values)}


_CAST_BUFFERS_CODE = '''def constants_to_bf16(model: nn.Module) -> None:
    """Cast buffers to bf16, as the parameters are; running statistics stay fp32."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.bfloat16())


'''
