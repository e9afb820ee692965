"""`unipar checkpoint import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unipar.cli.commands.checkpoint.export import RenameOption
from unipar.cli.commands.options import ConfigArgument, SetOption, read_config_file


def import_(
    file: ConfigArgument,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder or file of another library.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the checkpoint.")] = Path(
        "imported"
    ),
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Steps done, if SOURCE does not tell.")
    ] = None,
    rename: RenameOption = None,
    sets: SetOption = None,
    *,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Without the optimizer's state.")] = False,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read pickled files, in a process of their own.")
    ] = False,
) -> None:
    """Make a checkpoint from that of another library, from which a run of FILE goes on.

    Read are folders of DeepSpeed's save_checkpoint (any stage and number of ranks), of Accelerate's save_state, of
    torch.distributed.checkpoint (FSDP), Lightning's .ckpt, .pt files and safetensors; with the optimizer's moments
    where they are there. FILE names the task, whose model says which names and shapes there must be.

    \b
    unipar checkpoint import train.yaml zero3/ --trust-pickle -o start
    unipar run train.yaml --from start/step-00001000
    unipar checkpoint import train.yaml last.ckpt --trust-pickle --rename 'net.='
    unipar checkpoint import train.yaml model.safetensors --step 0
    """
    from unipar.checkpoint.exporting.selection import parse_rename
    from unipar.conversion.import_checkpoint import ImportWish, import_checkpoint

    config = read_config_file(file, sets).config
    pairs = [parse_rename(text) for text in rename or ()]
    done = import_checkpoint(config, ImportWish(source, out, step, pairs, trust_pickle, weights_only))
    lines = [f"{done.path}: {done.tensors} tensors, of step {done.step:,}", *done.remarks]
    typer.echo("\n".join([*lines, f"go on with: unipar run {file} --from {done.path}"]))
