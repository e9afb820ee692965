"""`unipar scale`."""

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


def scale(
    file: ConfigArgument,
    world: Annotated[
        str, typer.Option("--world", metavar="N,N,...", help="Sizes of worlds: 1,2,4.", show_default=False)
    ],
    cells: CellsOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
) -> None:
    """How much faster do more ranks train?

    Strong scaling keeps the total batch, and each rank's share shrinks; weak scaling keeps each
    rank's share, and the batch grows. All worlds are alive at once and take turns. Efficiency is
    samples/s, against so many times those of the smallest world as there are more ranks.

    \b
    unipar scale configs/quickstart.yaml --world 1,2,4
    unipar scale configs/quickstart.yaml --world 1,2 --cell native/nothing,native/parameters
    """
    from unipar.comparison.scale import scale as scaled

    found = scaled(read_config_file(file, sets, out=out), worlds=world, cells=cells or (), overwrite=overwrite)
    print_result(found)
