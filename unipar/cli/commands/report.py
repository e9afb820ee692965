"""`unipar report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
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
    versions. The folder's comparison, scaling and run have a page each, with links to the others. With two
    run folders, the page shows what changed from the first to the second.

    \b
    unipar report runs/quickstart
    unipar report runs/before runs/after --out change.html
    """
    from unipar.report.build import write_pages

    typer.echo("\n".join(write_pages(run, after, out)))
