"""`unipar checkpoint verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from unipar.cli.commands.checkpoint.shared import checkpoints_meant, progress_bar


def verify(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A checkpoint; of a run folder, all that are in it.", show_default=False),
    ],
) -> None:
    """Check all files of checkpoints, hashes included; exit 1 if one is broken, and say what is wrong with it.

    \b
    unipar checkpoint verify runs/char_gpt/checkpoints/step-00000500
    unipar checkpoint verify runs/char_gpt
    """
    from unipar.checkpoint.protocol.verifying import verify_checkpoint
    from unipar.errors import CheckpointError
    from unipar.utils.text import count_of, format_size

    broken = 0
    for checkpoint in checkpoints_meant(path):
        try:
            with progress_bar(checkpoint.name) as progress:
                contents = verify_checkpoint(checkpoint, progress=progress)
        except CheckpointError as e:
            broken += 1
            typer.echo(f"broken: {e}", err=True)
            continue
        manifest = contents.manifest
        tensors = count_of(len(manifest.tensors), "tensor")
        files = count_of(len(manifest.files), "file")
        size = format_size(manifest.bytes + manifest.bytes_beside)
        typer.echo(f"whole: {checkpoint}: {tensors}, {size} in {files}")
    raise typer.Exit(1 if broken else 0)
