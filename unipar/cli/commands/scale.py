"""`unipar scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from unipar.cli.commands.options import (
    ConfigArgument,
    DetailsOption,
    OutOption,
    OverwriteOption,
    SetOption,
    StrategiesOption,
    print_result,
    quote_files,
    read_config_file,
)


def scale(
    files: ConfigArgument,
    world: Annotated[
        str, typer.Option("--world", metavar="N,N,...", help="Numbers of ranks: 1,2,4.", show_default=False)
    ],
    strategies: StrategiesOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
    details: DetailsOption = False,
) -> None:
    """Measure how much faster more ranks train.

    Strong scaling keeps the total batch, so local batches shrink; weak scaling keeps the local batch, so the
    total batch grows. Ranks along tensor, pipeline and context have one local batch together.
    The worlds of all sizes exist at the same time and take turns. Efficiency is the samples/s of a world
    divided by (ranks / ranks of the smallest world) x the smallest world's samples/s.

    \b
    unipar scale configs/quickstart.yaml --world 1,2,4
    unipar scale configs/quickstart.yaml --world 1,2 --strategy native/nothing,native/parameters
    unipar scale configs/char_gpt.yaml --world 2,4 --strategy native/nothing+pipeline2
    """
    source = read_config_file(files, sets, out=out)
    from unipar.comparison.scale import scale as scale_worlds

    result = scale_worlds(source, worlds=world, strategies=strategies or (), overwrite=overwrite)
    steps = [f"unipar plan {quote_files(files)} --world 8,64   # larger worlds, predicted"]
    print_result(result, [] if result.code else steps, details=details)
