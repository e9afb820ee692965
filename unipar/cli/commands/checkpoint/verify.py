"""`unipar checkpoint verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unipar.cli.commands.checkpoint.shared import progress_bar


def verify(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A checkpoint; of a run folder, all that are in it.", show_default=False),
    ],
) -> None:
    """Check all files of checkpoints, hashes included; exit 1 if one is broken, and say what is wrong with it.

    \b
    unipar checkpoint verify runs/char_gpt/checkpoints/step-00000500
    unipar checkpoint verify runs/char_gpt
    """
    from unipar.checkpoint.format.names import MANIFEST_FILE, step_of_folder
    from unipar.checkpoint.overview.listing import folder_with_checkpoints
    from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
    from unipar.errors import CheckpointError
    from unipar.utils.text import count_of, format_size

    one = step_of_folder(path.name) is not None or (path / MANIFEST_FILE).exists() or path.is_symlink()
    paths = [path] if one else [found.path for found in find_checkpoints(folder_with_checkpoints(path))]
    broken = 0
    for checkpoint in paths:
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
        typer.echo(f"whole: {checkpoint}: {tensors}, {format_size(manifest.bytes)} in {files}")
    raise typer.Exit(1 if broken else 0)
