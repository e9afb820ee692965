"""`unipar run`."""

from __future__ import annotations

import typer

from unipar.cli.commands.options import (
    BackendOption,
    ConfigArgument,
    OutOption,
    OverwriteOption,
    SetOption,
    read_config_file,
)


def run(
    file: ConfigArgument,
    cell: BackendOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
) -> None:
    """Train as FILE describes.

    \b
    unipar run configs/char_gpt.yaml
    unipar run configs/char_gpt.yaml --backend deepspeed/gradients --set train.steps=100
    torchrun --nproc-per-node 2 -m unipar run configs/char_gpt.yaml
    """
    source = read_config_file(file, sets, cell, out)
    from unipar.backend.resources import find_foreign_place
    from unipar.launcher.launch import launch

    report = launch(source, overwrite=overwrite)
    place = find_foreign_place()
    if place is None or place.rank == 0:  # the other ranks of a foreign world share this terminal
        typer.echo(str(report))
