"""`unipar checkpoint inspect`."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer

from unipar.cli.commands.checkpoint.shared import CheckpointArgument, checkpoint_path
from unipar.cli.commands.options import JsonOption


def inspect(
    path: CheckpointArgument,
    only: Annotated[str, typer.Option("--only", metavar="PATTERN", help="Tensors whose names match.")] = "*",
    *,
    as_json: JsonOption = False,
) -> None:
    """Print what a checkpoint holds: its state in words, and each tensor with shape, dtype, kinds and size.

    A kind is `weight`, `buffer`, or what the optimizer calls it. No tensor is read.

    \b
    unipar checkpoint inspect runs/char_gpt
    unipar checkpoint inspect runs/char_gpt/checkpoints/step-00000500 --only '*.attention.*'
    unipar checkpoint inspect runs/char_gpt --json | jq .state.metrics
    """
    from unipar.checkpoint.overview.checkpoint_contents import checkpoint_as_data, describe_checkpoint
    from unipar.checkpoint.protocol.verifying import inspect_checkpoint

    contents = inspect_checkpoint(checkpoint_path(path))
    if as_json:
        typer.echo(json.dumps(checkpoint_as_data(contents, only), indent=2))
    else:
        typer.echo(describe_checkpoint(contents, only, shutil.get_terminal_size().columns))
