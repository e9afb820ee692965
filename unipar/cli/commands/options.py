"""Arguments, options and help texts that several commands share."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from unipar.backend.checks import CheckedSource
    from unipar.results.comparison import TurnResults
    from unipar.results.verdicts import Verdicts
    from unipar.utils.address import Location


def print_result(result: TurnResults | Verdicts, next_steps: Sequence[str] = (), *, details: bool = False) -> NoReturn:
    """Print the result in one screen with what to do next, or with `details` all of it; exit with its code."""
    from unipar.utils.screen import format_next_steps

    width = shutil.get_terminal_size().columns
    if details:
        typer.echo("\n".join([result.table(width), *format_next_steps(next_steps, width)]))
    else:
        typer.echo(result.screen(width, next_steps))
    raise typer.Exit(result.code)


def read_config_file(
    files: Sequence[Path],
    sets: list[str] | None,
    strategy: str | None = None,
    out: str | None = None,
    *,
    runs: bool = False,
) -> CheckedSource:
    """Return the config of `files`, the later ones changing the first, with `--set`, `--backend` and `--out`.

    If it `runs`, or is to be shown as a run has it, `resume: auto` keeps what the command of the run before has set.
    """
    from unipar.backend.checks import in_strategy, read_source

    first, *more = files
    source = read_source(first, sets or (), more=more)
    if out is not None:
        source = source.with_out(out)
    if runs:
        from unipar.launcher.preparation.earlier_config import keep_earlier_changes

        source = keep_earlier_changes(source, other_strategy=strategy is not None)
    return source if strategy is None else in_strategy(source, strategy)


def read_location(text: str) -> Location:
    """Return what a path or an address on the command line means; raise BadParameter if it cannot be one."""
    from unipar.utils.address import parse_location

    try:
        return parse_location(text)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None


EXIT_CODES_HELP = """Exit codes: 0 success; 1 a run failed, or an unexpected error; 2 the config, the task or the
command is wrong; 3 the backend or this machine cannot do it; 130 stopped by a signal at a step boundary, or Ctrl-C."""
"""Paragraph at the end of every command's help."""


ConfigArgument = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="The config, and files that change keys of it.", show_default=False),
]


def quote_files(files: Sequence[Path]) -> str:
    """Return the files of a config as words of a command."""
    return shlex.join(map(str, files))


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key: train.steps=100. May be repeated."),
]


BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="STRATEGY", help="Run in this strategy: native/parameters, horovod. Other keys stay."
    ),
]


OutOption = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Run folder, instead of that of the config.")
]


OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the contents of the run folder.")]


DetailsOption = Annotated[
    bool, typer.Option("--details", help="Print all tables, with the meaning of each figure, instead of one screen.")
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def split_at_commas(strategies: list[str] | None) -> list[str] | None:
    """Split each word at its commas, so that `--strategy a,b` means `--strategy a --strategy b`."""
    return (
        None
        if strategies is None
        else [strategy for word in strategies for part in word.split(",") if (strategy := part.strip())]
    )


STRATEGIES_METAVAR = "STRATEGY,STRATEGY,..."


StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "--strategies",
        metavar=STRATEGIES_METAVAR,
        callback=split_at_commas,
        help="Run these strategies instead of those that FILE names. May be repeated.",
    ),
]


WorldOption = Annotated[
    str | None,
    typer.Option("--world", metavar="N,N,...", help="Number of ranks; with several numbers, one comparison for each."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"unipar {version('unipar')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
