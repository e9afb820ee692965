"""`unipar init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A script with a task, or a folder with one.", show_default=False)
    ] = Path(),
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Instead of SCRIPT's .yaml.")] = None,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a first config beside a script, and the schema from which editors know its keys.

    The class with your model, data and loss is found in the script's text, which is not run.

    \b
    unipar init train.py
    """
    from unipar.conversion.config_schema import write_schema_beside
    from unipar.conversion.first_config import write_first_config

    written = write_first_config(script, out, overwrite=overwrite)
    commands = (
        ("check", "would it start?"),
        ("run", "train"),
        ("compare", "the same training in every strategy, as a table"),
    )
    width = max(len(name) for name, _ in commands)
    rows = [f"  unipar {name} {written}{' ' * (width - len(name))}  # {what}" for name, what in commands]
    typer.echo("\n".join([write_schema_beside(written), "next:", *rows]))
