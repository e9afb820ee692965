"""`unipar report` and `unipar runs`: the pages of results, and the list of all results in a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from unipar.results.run_list import RunEntry

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
    """List runs, comparisons, scalings and verifications.

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


_NO_VALUE = "-"

_LEFT = ("run", "strategy", "state")

_FOLDED = ("run", "strategy")
"""Columns whose texts go on in a further line where the terminal is too narrow."""

_DROPPED_FIRST = ("MFU", "size", "speed")
"""Columns that are left out where the terminal is too narrow, in this order."""

_STYLES = {"running": "cyan", "ended": "green", "failed": "red", "stopped": "yellow", "died": "red"}


def _columns(found: Sequence[RunEntry]) -> dict[str, Callable[[RunEntry], str]]:
    """Return how each column shows a run; without what a step did, if that is known of none."""
    from unipar.utils.text import format_clock, format_number, format_rate, format_size

    def steps(entry: RunEntry) -> str:
        total = f"/{entry.of}" if entry.of and entry.kind == "run" else ""
        return _NO_VALUE if entry.steps is None else f"{entry.steps}{total}"

    def loss(entry: RunEntry) -> str:
        has_loss = entry.kind == "run" and bool(entry.steps) and entry.state != "unreadable"
        return format_number(entry.loss) if has_loss else _NO_VALUE

    def speed(entry: RunEntry) -> str:
        units = (unit for unit in ("tokens", "samples") if f"{unit}_per_second" in entry.speed)
        return next((f"{format_rate(entry.speed[f'{unit}_per_second'])} {unit}/s" for unit in units), _NO_VALUE)

    columns: dict[str, Callable[[RunEntry], str]] = {
        "run": lambda entry: entry.name,
        "strategy": lambda entry: entry.strategy or _NO_VALUE,
        "ranks": lambda entry: _NO_VALUE if entry.ranks is None else str(entry.ranks),
        "steps": steps,
        "loss": loss,
        "speed": speed,
        "MFU": lambda entry: f"{entry.speed['mfu']:.1%}" if "mfu" in entry.speed else _NO_VALUE,
        "took": lambda entry: _NO_VALUE if entry.seconds is None else format_clock(entry.seconds),
        "size": lambda entry: format_size(entry.size),
        "state": lambda entry: entry.state,
    }
    empty = [name for name in ("speed", "MFU") if all(columns[name](entry) == _NO_VALUE for entry in found)]
    return {name: of for name, of in columns.items() if name not in empty}


def format_runs(found: Sequence[RunEntry]) -> str:
    """Return the plain list for a pipe or a file: one line for each run, with the sentence on its state at the end."""
    from unipar.utils.table import format_table

    columns = _columns(found)
    rows = [[of(entry) for of in columns.values()] for entry in found]
    for row, entry in zip(rows, found, strict=True):
        row[-1] += f": {entry.why}" if entry.why else ""
    right = [i for i, name in enumerate(columns) if name not in _LEFT]
    return format_table(tuple(columns), rows, right=right, width=sys.maxsize)


def draw_runs(found: Sequence[RunEntry]) -> None:
    """Draw the table as wide as the terminal, with as many columns as fit; sentences are below it."""
    from rich.console import Console
    from rich.text import Text

    from unipar.utils.table import NARROWEST_CELL

    console, columns = Console(highlight=False), _columns(found)
    drawn = _rich_table(found, columns)
    saved = sum(max(0, max(len(columns[name](entry)) for entry in found) - NARROWEST_CELL) for name in _FOLDED)
    for name in _DROPPED_FIRST:
        if console.measure(drawn, options=console.options.update(width=sys.maxsize)).maximum - saved <= console.width:
            break
        columns.pop(name, None)
        drawn = _rich_table(found, columns)
    console.print(drawn)
    for entry in found:
        if entry.why:
            console.print(Text(f"{entry.name}: {entry.why}"))


def _rich_table(found: Sequence[RunEntry], columns: Mapping[str, Callable[[RunEntry], str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        justify = "left" if name in _LEFT else "right"
        drawn.add_column(name, justify=justify, overflow="fold", no_wrap=name not in _FOLDED)
    for entry in found:
        *texts, state = (of(entry) for of in columns.values())
        drawn.add_row(*map(Text, texts), Text(state, style=_STYLES.get(state, "magenta")))
    return drawn
