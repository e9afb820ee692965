"""`unipar checkpoint diff`."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer

from unipar.cli.commands.checkpoint.shared import checkpoint_path, progress_bar
from unipar.cli.commands.options import JsonOption


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a run folder.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: which tensors differ, by how much, in how many elements.

    They may come from any strategies and numbers of ranks.
    Exit 1 if tensors differ or a name is in one only. Keys of the state that differ are listed and do not count.

    \b
    unipar checkpoint diff runs/char_gpt runs/char_gpt-2
    unipar checkpoint diff run/checkpoints/step-00000100 run/checkpoints/step-00000200
    """
    from unipar.checkpoint.overview.checkpoint_difference import compare_checkpoints
    from unipar.checkpoint.protocol.verifying import verify_checkpoint

    paths = checkpoint_path(a), checkpoint_path(b)
    with progress_bar("verifying") as progress:
        first, second = (verify_checkpoint(path, progress=progress) for path in paths)
    with progress_bar("comparing") as progress:
        difference = compare_checkpoints(first, second, progress)
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(difference), indent=2))
    else:
        typer.echo(difference.text(shutil.get_terminal_size().columns))
    raise typer.Exit(1 if difference.any else 0)
