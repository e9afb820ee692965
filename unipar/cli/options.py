"""Arguments that several commands share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from unipar.config.source import Source
    from unipar.results.comparison import Found
    from unipar.results.verdicts import Verdicts


def print_result(found: Found | Verdicts, more: str = "") -> NoReturn:
    """Its table, what else there is to say, and its exit code."""
    typer.echo(found.table(shutil.get_terminal_size().columns) + more)
    raise typer.Exit(found.code)


def read_config_file(file: Path, sets: list[str] | None, cell: str | None = None, out: str | None = None) -> Source:
    from unipar.backend.checks import in_cell, read_source
    from unipar.config import Cell

    source = read_source(file, sets or ())
    if cell is not None:
        source = in_cell(source, Cell.parse(cell))
    return source if out is None else source.with_out(out)


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
