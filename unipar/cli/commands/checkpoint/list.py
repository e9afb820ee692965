"""`unipar checkpoint list`."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer

from unipar.cli.commands.options import JsonOption, read_location


def print_list(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A run folder, or a folder with checkpoints.", show_default=False)
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """List checkpoints: step, age, size, metrics, the strategy and ranks that saved them, and what is wrong.

    Files, sizes, headers and the manifest's hash are checked; the hashes of tensors are what `verify` checks.
    `best` is as recorded in the newest complete checkpoint.

    \b
    unipar checkpoint list runs/char_gpt
    unipar checkpoint list /data/checkpoints --json
    unipar checkpoint list s3://bucket/path/char_gpt-1f6e02ab
    """
    from unipar.checkpoint.overview.listing import checkpoint_table, list_checkpoints

    listed = list_checkpoints(read_location(folder))
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(one) for one in listed], indent=2))
    else:
        typer.echo(checkpoint_table(listed, shutil.get_terminal_size().columns))
