"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXITS = """Exit codes: 0 all is well; 1 a run failed, or something unforeseen; 2 the config, the task or the command is
wrong; 3 the backend or this machine cannot do it; 130 stopped by a signal at a step boundary, or Ctrl-C."""

File = Annotated[Path, typer.Argument(metavar="FILE", help="The config.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key: train.steps=100. Repeat it for more."),
]
InCell = Annotated[
    str | None, typer.Option("--backend", metavar="CELL", help="Another cell: native/parameters, horovod.")
]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Another run folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the run folder holds.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def apart(cells: list[str] | None) -> list[str] | None:
    """Several in one word have commas between them, as sizes of worlds have."""
    return None if cells is None else [cell for word in cells for part in word.split(",") if (cell := part.strip())]


CELL = "CELL,CELL,..."
Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cell", "--cells", metavar=CELL, callback=apart, help="Instead of those that FILE names. May be repeated."
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option("--world", metavar="N,N,...", help="So many ranks; with several sizes, a comparison in each."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"unipar {version('unipar')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
]
