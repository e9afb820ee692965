"""`unipar trace`: the traces of a run as text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from unipar.cli.commands.options import JsonOption


def print_traces(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the ten largest entries of a run's traces, and where the files are.

    Runs with `log.trace` write them: what PyTorch's profiler recorded in some steps. The time of an entry is its own,
    without what it calls; on a device it is that of kernels.

    \b
    unipar run train.yaml --set 'log.trace={steps: [10, 12]}'
    unipar trace runs/train
    unipar trace runs/train --json
    """
    from unipar.results.run_traces import HOW_TO_OPEN, read_traces

    traces = read_traces(run)
    if as_json:
        typer.echo(json.dumps([trace.as_data() for trace in traces], indent=2))
        return
    width = shutil.get_terminal_size().columns
    for trace in traces:
        typer.echo(f"{trace.table(width)}\n\n{trace.file}: {HOW_TO_OPEN}\n")
