"""`unipar export` and `unipar import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unipar.cli.commands.options import ConfigArgument, SetOption, read_config_file


def export(
    files: ConfigArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="NAME", help="torchrun, deepspeed, accelerate, horovod.", show_default=False)
    ],
    sets: SetOption = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Instead of ./CONFIG-NAME-TO.")] = None,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Write the same training as a script that does not need unipar.

    Writes a folder: the loop as that library's users would write it, its own config, your task, and run.sh.
    The script gives the same losses as `unipar run`.

    \b
    unipar export configs/char_gpt.yaml --to torchrun --set parallel.data=2
    unipar export configs/char_gpt.yaml --to deepspeed --set parallel.shard=gradients -o zero2
    """
    source = read_config_file(files, sets)
    from unipar.conversion.export import export_script

    typer.echo(str(export_script(source, to, out, overwrite=overwrite)))


def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="ds_config.json, accelerate.yaml, a trainer's file.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write to a file.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Give a value that FILE leaves open. Repeat it for more."),
    ] = None,
    world: Annotated[int | None, typer.Option("--world", metavar="N", help="Number of ranks.", min=1)] = None,
    leave: Annotated[
        list[str] | None, typer.Option("--leave", metavar="KEY", help="Ignore a key of FILE. Repeat it for more.")
    ] = None,
    args: Annotated[
        str | None,
        typer.Option("--args", metavar="ARGS", help="Trainer's arguments: .json, .yaml, or '--seed 1 ...'."),
    ] = None,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Ask for what FILE leaves open; assume nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a config of unipar from the config of another library.

    A key that cannot be converted is refused, with the reason. Values that FILE leaves to the script come from --args,
    or else from the defaults of Hugging Face's Trainer, and are listed.

    \b
    unipar import ds_config.json --args "--learning_rate 2e-5 --num_train_epochs 1" -o train.yaml
    unipar import ds_config.json --set train.steps=1000 -o train.yaml
    unipar import axolotl.yaml -o train.yaml
    unipar import accelerate.yaml --set train.epochs=3 --set batch.total=32 --set 'train.optimizer={lr: 3.0e-4}'
    """
    from unipar.conversion.config_schema import write_schema_beside
    from unipar.conversion.import_config import import_library_config, write_config

    imported = import_library_config(file, sets or (), world=world, leave=leave or (), args=args, strict=strict)
    assumed = [f"assumed: {note}" for note in imported.assumed]
    if out is None:
        typer.echo(imported.text, nl=False)
        for line in assumed:
            typer.echo(line, err=True)
        return
    write_config(imported.text, out, overwrite=overwrite)
    typer.echo("\n".join([write_schema_beside(out), *assumed, *(f"left out: {note}" for note in imported.left_out)]))
