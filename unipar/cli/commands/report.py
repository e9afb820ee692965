"""`unipar report` and `unipar runs`: the pages of results, and the list of all results in a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import JsonOption

if TYPE_CHECKING:
    from unipar.results.run_list import RunEntry

RUNS_FOLDER = Path("runs")
"""Folder of the runs whose config gives no `out`."""


def report(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run folder. Default: the newest in runs/.", show_default=False),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Argument(metavar="[AFTER]", help="A later run folder, compared with RUN.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Instead of report.html in the folder.")
    ] = None,
) -> None:
    """Write the HTML pages of a run folder.

    Each page is one file with figures and tables, for a browser or to be sent on: memory, losses, time, config,
    versions. The folder's comparison, scaling, verification and run have a page each, with links. With two
    run folders, the page shows what changed from the first to the second. Without a folder it is the one in runs/
    whose results are the newest.

    \b
    unipar report
    unipar report runs/quickstart
    unipar report runs/before runs/after --out change.html
    """
    from unipar.report.build import write_pages
    from unipar.report.newest import find_newest_results

    if run is None:
        run = find_newest_results(RUNS_FOLDER)
        typer.echo(f"newest in {RUNS_FOLDER}: {run}")
    typer.echo("\n".join(write_pages(run, after, out)))


def print_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder with run folders. Default: runs.", show_default=False)
    ] = RUNS_FOLDER,
    *,
    as_json: JsonOption = False,
) -> None:
    """List what was run: runs, comparisons, scalings and verifications.

    Each with its cell, ranks, steps done, last loss, state, duration and size on disk, the latest start last.
    running: a process of it is alive; ended; failed and stopped: below is why; died: its processes are gone, and none
    has recorded an end, as after kill -9 or a power cut; unreadable: a file of it is broken.

    \b
    unipar runs
    unipar runs results/sweep
    unipar runs --json
    """
    from unipar.results.run_list import list_runs

    found = list_runs(folder)
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(entry) for entry in found], indent=2))
    elif not found:
        typer.echo(f"{folder} holds no runs")
    elif sys.stdout.isatty():
        draw_runs(found)
    else:
        typer.echo(format_runs(found))


COLUMNS = ("run", "cell", "ranks", "steps", "loss", "took", "size", "state")

_STYLES = {"running": "cyan", "ended": "green", "failed": "red", "stopped": "yellow", "died": "red"}


def _cells_of_row(entry: RunEntry) -> list[str]:
    """Return the texts of a run's row; what is not known is a dash."""
    from unipar.utils.text import format_clock, format_number, format_size

    total = f"/{entry.of}" if entry.of and entry.kind == "run" else ""
    has_loss = entry.kind == "run" and bool(entry.steps) and entry.state != "unreadable"
    return [
        entry.name,
        entry.cell or "-",
        "-" if entry.ranks is None else str(entry.ranks),
        "-" if entry.steps is None else f"{entry.steps}{total}",
        format_number(entry.loss) if has_loss else "-",
        "-" if entry.seconds is None else format_clock(entry.seconds),
        format_size(entry.size),
        entry.state,
    ]


def format_runs(found: Sequence[RunEntry]) -> str:
    """Return the plain list for a pipe or a file: one line for each run, with the sentence on its state at the end."""
    from unipar.utils.table import format_table

    rows = [_cells_of_row(entry) for entry in found]
    for row, entry in zip(rows, found, strict=True):
        row[-1] += f": {entry.why}" if entry.why else ""
    return format_table(COLUMNS, rows, right=range(2, 7), width=sys.maxsize)


def draw_runs(found: Sequence[RunEntry]) -> None:
    """Draw the table as wide as the terminal; sentences are below it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        justify = "right" if name in COLUMNS[2:7] else "left"
        wide = name in ("run", "cell")
        drawn.add_column(name, justify=justify, overflow="fold", no_wrap=not wide)
    for entry in found:
        *texts, state = _cells_of_row(entry)
        drawn.add_row(*map(Text, texts), Text(state, style=_STYLES.get(state, "magenta")))
    console = Console(highlight=False)
    console.print(drawn)
    for entry in found:
        if entry.why:
            console.print(Text(f"{entry.name}: {entry.why}"))
