"""`unipar verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from unipar.cli.options import (
    CellsOption,
    ConfigArgument,
    OutOption,
    OverwriteOption,
    SetOption,
    print_result,
    read_config_file,
)


def verify(
    file: ConfigArgument,
    cells: CellsOption = None,
    world: Annotated[int | None, typer.Option("--world", metavar="N", min=2, help="Ranks in each cell.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Optimizer steps; 10 without it.")
    ] = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
) -> None:
    """Do all cells give the numbers of one process, on this very task?

    Some steps in one process, in fp64 and as configured, and cut in several ways; then in every
    cell. Where one parts: the first step, module and parameter, and what kind of fault fits.
    Exit 0 when all that ran agree.

    \b
    unipar verify configs/char_gpt.yaml
    unipar verify configs/char_gpt.yaml --cells native/parameters --cells 'deepspeed/*' --world 4
    """
    source = read_config_file(file, sets, out=out)
    from unipar.verification.verify import verify as verified

    found = verified(source, cells=cells or (), world=world, steps=steps, overwrite=overwrite)
    print_result(found)
