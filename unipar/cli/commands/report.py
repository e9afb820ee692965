"""`unipar report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    after: Annotated[
        Path | None, typer.Argument(metavar="[AFTER]", help="A later one: RUN is laid below it.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Instead of report.html in it.")] = None,
) -> None:
    """The pages of a run folder: of a comparison, a scaling, a run.

    Each is one file with figures and tables, to be opened in a browser or sent on: memory, losses, time,
    config, versions. Each thing that lies there has its page, with links to the others. With two
    comparisons or two runs, what changed from the first to the second.

    \b
    unipar report runs/quickstart
    unipar report runs/before runs/after --out change.html
    """
    from unipar.report.build import write_pages

    typer.echo("\n".join(write_pages(run, after, out)))
