"""`unipar run`."""

from __future__ import annotations

import typer

from unipar.cli.options import File, InCell, Out, Overwrite, Sets, read_config_file


def run(file: File, cell: InCell = None, sets: Sets = None, out: Out = None, *, overwrite: Overwrite = False) -> None:
    """Train what FILE says.

    \b
    unipar run configs/char_gpt.yaml
    unipar run configs/char_gpt.yaml --backend deepspeed/gradients --set train.steps=100
    torchrun --nproc-per-node 2 -m unipar run configs/char_gpt.yaml
    """
    source = read_config_file(file, sets, cell, out)
    from unipar.backend.resources import found
    from unipar.launcher.launch import launch

    report = launch(source, overwrite=overwrite)
    place = found()
    if place is None or place.rank == 0:  # the other ranks of a foreign world share this terminal
        typer.echo(str(report))
