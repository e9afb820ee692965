"""`unipar plan`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from unipar.cli.commands.options import (
    CellsOption,
    ConfigArgument,
    JsonOption,
    SetOption,
    read_config_file,
)
from unipar.errors import ConfigError


def plan(
    file: ConfigArgument,
    cells: CellsOption = None,
    world: Annotated[
        str | None,
        typer.Option("--world", metavar="N,N,...", help="Numbers of ranks: 1,8,64. Any, whatever is here."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Memory that a rank has: 80GiB, 512MiB.")
    ] = None,
    headroom: Annotated[
        str, typer.Option("--headroom", metavar="SHARE", help="Share of it that is to stay free.")
    ] = "5%",
    sets: SetOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Predict the memory of each cell, without starting a process or allocating the model.

    The task's model and loss run on tensors without memory; what each backend holds beside them is computed. The
    table has each rank's peak by category, in the phases of compare's account; with --memory, whether it fits, and
    the largest microbatch that does, with the total batch kept.

    \b
    unipar plan configs/char_gpt.yaml --world 1,2,8 --memory 80GiB
    unipar plan configs/char_gpt.yaml --cell 'native/*' --world 64 --set batch.total=512
    """
    source = read_config_file(file, sets)
    from unipar.comparison.plan import plan as plan_cells

    planned = plan_cells(
        source,
        cells=cells or (),
        worlds=[read_ranks(word) for word in (world or "").split(",") if word],
        memory=None if memory is None else read_size(memory),
        headroom=read_share(headroom),
    )
    typer.echo(planned.as_json() if as_json else planned.table(shutil.get_terminal_size().columns))
    raise typer.Exit(0 if any(not row.refusal for row in planned.rows) else 3)


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def read_size(text: str) -> int:
    """Return a number of bytes from words such as 80GiB; raise ConfigError if they are none."""
    number = text.rstrip("BKMGTPi ")
    unit = text[len(number) :].strip()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ConfigError(f"--memory {text}: a size is a number and one of {', '.join(_UNITS)}: 80GiB") from None
    if size <= 0:
        raise ConfigError(f"--memory {text}: a rank has more than that; a size is positive: 80GiB")
    return int(size)


def read_share(text: str) -> float:
    """Return a share from words such as 5%; raise ConfigError if they are none."""
    try:
        share = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"--headroom {text}: a share is from 0% to less than 100%: 5%, or 0.05")
    return share


def read_ranks(text: str) -> int:
    """Return a number of ranks; raise ConfigError if it is none."""
    if not text.strip().isdigit() or int(text) < 1:
        raise ConfigError(f"--world: {text!r} is no number of ranks; say for example --world 1,8,64")
    return int(text)
