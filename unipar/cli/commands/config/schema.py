"""`unipar schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def build_schema(
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write to a file.")] = None,
) -> None:
    """Print the JSON Schema of configs, for editors.

    \b
    unipar schema
    unipar schema --write unipar.schema.json
    """
    from unipar.conversion.config_schema import schema_text, write_schema

    if write is None:
        typer.echo(schema_text(), nl=False)
    else:
        write_schema(write)
