"""`unipar checkpoint export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unipar.cli.commands.checkpoint.shared import CheckpointArgument, checkpoint_path, progress_bar

RenameOption = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="Replace the beginning of names; 'net.=' takes net. away."),
]


def export(
    path: CheckpointArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="safetensors, hf, peft, torch, dcp.")
    ] = "safetensors",
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="PATH", help="Instead of ./step-N-FORMAT.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PATTERN", help="Names that match. Repeat it for more.")
    ] = None,
    rename: RenameOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16, fp16, fp64 for floating point.")
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Largest file, with --to hf.")] = "5GB",
    weights: Annotated[
        str, typer.Option("--weights", metavar="WHICH", help="averages: those of train.ema, if there are any; raw.")
    ] = "averages",
    adapter: Annotated[str, typer.Option("--adapter", metavar="NAME", help="With --to peft.")] = "default",
    *,
    trainable: Annotated[bool, typer.Option("--trainable", help="Only parameters that were trained.")] = False,
) -> None:
    """Write the weights of a checkpoint for other libraries.

    safetensors: one file. hf: model.safetensors, or several files with their index, as transformers reads them.
    peft: adapter_model.safetensors with the trained parameters of an adapter. torch: a state dict for torch.load.
    dcp: a folder for torch.distributed.checkpoint. The checkpoint is verified first; one tensor is in memory at a time.

    \b
    unipar checkpoint export runs/char_gpt
    unipar checkpoint export runs/llama --to hf --dtype bf16 --size 2GB -o llama/
    unipar checkpoint export runs/lora --to peft -o adapter/
    unipar checkpoint export runs/llama --to torch --only '*.norm.*' --only lm_head.weight -o some.pt
    """
    from unipar.checkpoint.exporting.selection import parse_rename
    from unipar.checkpoint.exporting.writing import ExportWish, export_checkpoint
    from unipar.checkpoint.protocol.verifying import verify_checkpoint
    from unipar.utils.procfs import anonymous_memory
    from unipar.utils.text import count_of, format_size

    wish = ExportWish(
        to=to,
        only=only or (),
        trainable=trainable,
        rename=[parse_rename(text) for text in rename or ()],
        dtype=dtype,
        size=size,
        weights=weights,
        adapter=adapter,
    )
    with progress_bar("verifying") as progress:
        only_trained = trainable or to == "peft"  # frozen weights need not be there
        contents = verify_checkpoint(checkpoint_path(path), progress=progress, beside=not only_trained)
    before = anonymous_memory()
    with progress_bar("writing") as progress:
        done = export_checkpoint(contents, out, wish, progress)
    tensors, files = count_of(done.tensors, "tensor"), count_of(done.files, "file")
    typer.echo(f"{done.path}: {tensors}, {format_size(done.bytes)} in {files}, of step {contents.manifest.step:,}")
    memory = [format_size(size) for size in (anonymous_memory("VmHWM"), before)]
    typer.echo(f"host memory: {memory[0]} at the peak, {memory[1]} before the first tensor")
    if done.averages:
        taken = count_of(done.averages, "weight")
        typer.echo(f"averages of {taken}, as train.ema has kept them; --weights raw writes the weights themselves")
    if done.config:
        typer.echo(done.config)
    if done.left_out:
        typer.echo(done.left_out)
