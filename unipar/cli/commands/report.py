"""`unipar report` and `unipar runs`: the pages of results, and the list of all results in a folder."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from unipar.results.run_list import RunEntry
    from unipar.utils.columns import Column

RUNS_FOLDER = Path("runs")
"""Folder of the runs whose config gives no `out`."""


def report(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run folder; by default the newest in runs/.", show_default=False),
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

    Each page is one file with figures and tables of memory, losses, time, config and versions. The folder's
    comparison, scaling, verification and run have a page each, with links. With two run folders, the page shows
    what changed from the first to the second. Without a folder, the folder in runs/ with the newest results is taken.

    An observed command is compared with another one, with a run, or with a strategy's folder in a comparison; what
    changed is printed, too.

    \b
    unipar report
    unipar report runs/quickstart
    unipar report runs/before runs/after --out change.html
    unipar report observed runs/quickstart
    """
    from unipar.report.build import write_pages
    from unipar.report.newest import find_newest_results

    if run is None:
        run = find_newest_results(RUNS_FOLDER)
        typer.echo(f"newest in {RUNS_FOLDER}: {run}")
    typer.echo("\n".join(write_pages(run, after, out, shutil.get_terminal_size().columns)))


def print_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder with run folders. Default: runs.", show_default=False)
    ] = RUNS_FOLDER,
    *,
    as_json: JsonOption = False,
) -> None:
    """List runs, observed commands, comparisons, scalings and verifications.

    Columns: strategy, ranks, steps done, last loss, speed, MFU, duration, size on disk and state, the latest start
    last; a narrow terminal has fewer columns. Speed is in samples a second up to the last logged step, or in tokens a
    second if the task has a weight. MFU is the fraction of the devices' peak, if that is known.

    States: `running`: one of its processes is alive; `ended`; `failed` and `stopped`: the reason is below; `died`: its
    processes are gone without a record of an end, as after kill -9 or a power cut; `unreadable`: a file is broken.

    \b
    unipar runs
    unipar runs results/sweep
    unipar runs --json
    """
    from unipar.results.run_list import list_runs

    entries = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
    elif not entries:
        typer.echo(f"{folder} holds no runs")
    elif sys.stdout.isatty():
        draw_runs(entries)
    else:
        typer.echo(format_runs(entries))


_FOLDED = ("run", "strategy")
"""Columns whose texts go on in a further line where the terminal is too narrow."""

_STYLES = {"running": "cyan", "ended": "green", "failed": "red", "stopped": "yellow", "died": "red"}


def format_runs(entries: Sequence[RunEntry]) -> str:
    """Return the plain list for a pipe or a file: one line for each run, with the sentence on its state at the end."""
    from unipar.results.run_list import RUN_COLUMNS
    from unipar.utils.columns import known_columns, table_blocks

    *columns, state = known_columns(RUN_COLUMNS, entries)

    def why(entry: RunEntry) -> str:
        return f"{entry.state}: {entry.why}" if entry.why else entry.state

    return "\n".join(
        line
        for block in table_blocks([*columns, replace(state, value=why)], entries, width=sys.maxsize)
        for line in block
    )


def draw_runs(entries: Sequence[RunEntry]) -> None:
    """Draw the table as wide as the terminal, with as many columns as fit; sentences are below it."""
    from rich.console import Console
    from rich.text import Text

    from unipar.results.run_list import RUN_COLUMNS
    from unipar.utils.columns import known_columns
    from unipar.utils.table import NARROWEST_CELL

    console, columns = Console(highlight=False), known_columns(RUN_COLUMNS, entries)
    drawn = _rich_table(entries, columns)
    folded = [column for column in columns if column.head in _FOLDED]
    saved = sum(max(0, max(len(column.text(entry)) for entry in entries) - NARROWEST_CELL) for column in folded)
    for place in (1, 2, 3):
        if console.measure(drawn, options=console.options.update(width=sys.maxsize)).maximum - saved <= console.width:
            break
        columns = [column for column in columns if column.dropped != place]
        drawn = _rich_table(entries, columns)
    console.print(drawn)
    for entry in entries:
        if entry.why:
            console.print(Text(f"{entry.name}: {entry.why}"))


def _rich_table(entries: Sequence[RunEntry], columns: Sequence[Column[RunEntry]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify = "right" if column.right else "left"
        drawn.add_column(column.head, justify=justify, overflow="fold", no_wrap=column.head not in _FOLDED)
    for entry in entries:
        *texts, state = (column.text(entry) for column in columns)
        drawn.add_row(*map(Text, texts), Text(state, style=_STYLES.get(state, "magenta")))
    return drawn
