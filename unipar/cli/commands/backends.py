"""`unipar backends`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from unipar.backend.cells import cells_of_backend
from unipar.backend.installed import ImportProbe, probe_imports
from unipar.backend.registry import backend_names, find_backend
from unipar.cli.options import JsonOption
from unipar.utils.table import format_table


def print_backends(*, as_json: JsonOption = False) -> None:
    """Who can train here, and in which cells.

    Of those that cannot, how to get them.

    \b
    unipar backends
    unipar backends --json
    """
    from unipar.cli.commands.backends import list_backends as listed

    listed(as_json=as_json)


@dataclass(frozen=True)
class BackendRow:
    """One backend, as data: what `--json` prints."""

    name: str
    installed: bool
    version: str | None
    """Of its library; None where it cannot be imported."""

    why: str | None
    """Why it cannot be used, and the way out."""

    install: str
    """What to type to get it."""

    cells: list[str]
    devices: list[str]
    gaps: dict[str, str]
    """Precisions that it cannot do, by name or shard/name, each with its sentence."""


def rows() -> list[BackendRow]:
    """Every backend known; a library is imported in a process of its own."""
    looked = probe_imports(backend_names())
    return [_backend_row(name, looked[name]) for name in looked]


def _backend_row(name: str, found: ImportProbe) -> BackendRow:
    backend = find_backend(name)
    can = backend.capabilities
    hint = backend.hint or "it comes with unipar"
    broken = f"{found.broken} (install it again: {hint})" if found.broken else None
    return BackendRow(
        name=name,
        installed=found.version is not None,
        version=found.version,
        why=found.absent or broken,
        install=hint,
        cells=[str(cell) for cell in cells_of_backend(backend)],
        devices=list(can.devices),
        gaps={
            precision if shard is None else f"{shard}/{precision}": why for (shard, precision), why in can.gaps.items()
        },
    )


def list_backends(*, as_json: bool = False) -> None:
    """Prints them: a table, or JSON."""
    found = rows()
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in found], indent=2) + "\n")
    elif sys.stdout.isatty():
        _draw_backends(found)
    else:
        sys.stdout.write(format_backends(found) + "\n")


def format_backends(found: list[BackendRow]) -> str:
    """One line for each thing there is to say of a backend, for a pipe or a file."""
    lines = [
        line
        for row in found
        for line in (
            (row.name, "library", row.version or row.why or ""),
            ("", "cells", ", ".join(row.cells)),
            ("", "devices", ", ".join(row.devices)),
            *(("", f"no {precision}", why) for precision, why in row.gaps.items()),
        )
    ]
    return format_table(("backend", "what", ""), lines, width=120)


def _draw_backends(found: list[BackendRow]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("cells", no_wrap=True)
    for name in ("library", "devices", "not"):
        drawn.add_column(name, overflow="fold")
    for row in found:
        library = Text(row.version, style="green") if row.version else Text(row.why or "", style="red")
        gaps = Text("\n".join(row.gaps) or "-")
        drawn.add_row(Text("\n".join(row.cells)), library, ", ".join(row.devices), gaps, end_section=True)
    Console().print(drawn)
