"""`unipar backends` and `unipar install`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import JsonOption

if TYPE_CHECKING:
    from unipar.backend.installed import ImportProbe


def print_backends(*, as_json: JsonOption = False) -> None:
    """List the backends that can train here, and their strategies.

    For the others: why not, and how to install them.

    \b
    unipar backends
    unipar backends --json
    """
    list_backends(as_json=as_json)


@dataclass(frozen=True)
class BackendRow:
    """One backend as data, as `--json` prints it."""

    name: str
    installed: bool
    version: str | None
    """Version of its library; None where the library cannot be imported."""

    why: str | None
    """Reason why the backend cannot be used, and the way out; None where it can."""

    install: str
    """Command that installs the backend's library."""

    strategies: list[str]
    devices: list[str]
    tried: dict[str, str]
    """Devices on which the backend has run, each with how: "" in reality, or emulated."""

    gaps: dict[str, str]
    """Reasons for the precisions that the backend does not support, by precision or shard/precision."""

    short_names: dict[str, str] = field(default_factory=dict[str, str])
    """Strategies that have one, each with its short name."""

    @property
    def named_strategies(self) -> list[str]:
        """Strategies, each with its short name: native/parameters (fsdp2)."""
        return [f"{s} ({self.short_names[s]})" if s in self.short_names else s for s in self.strategies]


def rows() -> list[BackendRow]:
    """Return a row for every known backend; import each library in a process of its own to learn its version."""
    from unipar.backend.installed import probe_imports
    from unipar.backend.registry import backend_names

    probes = probe_imports(backend_names())
    return [_backend_row(name, probe) for name, probe in probes.items()]


def _backend_row(name: str, probe: ImportProbe) -> BackendRow:
    from unipar.backend.offered_strategies import strategies_of_backend
    from unipar.backend.registry import find_backend

    backend = find_backend(name)
    can = backend.capabilities
    hint = backend.hint or "it comes with unipar"
    broken = f"{probe.broken} (install it again: {hint})" if probe.broken else None
    return BackendRow(
        name=name,
        installed=probe.version is not None,
        version=probe.version,
        why=probe.absent or broken,
        install=hint,
        strategies=[str(strategy) for strategy in strategies_of_backend(backend)],
        devices=list(can.devices),
        tried=dict(can.tried),
        gaps={
            precision if shard is None else f"{shard}/{precision}": why for (shard, precision), why in can.gaps.items()
        },
        short_names={f"{name}/{shard}": short for short, shard in can.short_names.items()},
    )


def list_backends(*, as_json: bool = False) -> None:
    """Print all backends: a drawn table on a terminal, plain lines elsewhere, or JSON."""
    backend_rows = rows()
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in backend_rows], indent=2) + "\n")
    elif sys.stdout.isatty():
        _draw_backends(backend_rows)
    else:
        sys.stdout.write(format_backends(backend_rows) + "\n")


def format_backends(rows: list[BackendRow]) -> str:
    """Return the plain table for a pipe or a file: each property of a backend on a line of its own."""
    from unipar.utils.table import format_table

    lines = [
        line
        for row in rows
        for line in (
            (row.name, "library", row.version or row.why or ""),
            ("", "strategies", ", ".join(row.named_strategies)),
            ("", "devices", _describe_devices(row)),
            *(("", f"no {precision}", why) for precision, why in row.gaps.items()),
        )
    ]
    return format_table(("backend", "what", ""), lines, width=120)


def _describe_devices(row: BackendRow) -> str:
    """Return the devices, each with how it was tried, if not in reality."""
    names: list[str] = []
    for device in row.devices:
        how = row.tried.get(device, "never tried")
        names.append(f"{device} ({how})" if how else device)
    return ", ".join(names)


def _draw_backends(rows: list[BackendRow]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("strategies", no_wrap=True)
    for name in ("library", "devices", "not"):
        drawn.add_column(name, overflow="fold")
    for row in rows:
        library = Text(row.version, style="green") if row.version else Text(row.why or "", style="red")
        gaps = Text("\n".join(row.gaps) or "-")
        drawn.add_row(Text("\n".join(row.named_strategies)), library, _describe_devices(row), gaps, end_section=True)
    Console().print(drawn)


def install(
    name: Annotated[str, typer.Argument(metavar="BACKEND", help="Name in `unipar backends`.", show_default=False)],
    *,
    force: Annotated[bool, typer.Option("--force", help="Build it again even if it is installed.")] = False,
) -> None:
    """Build and install a library that pip alone cannot install.

    \b
    unipar install horovod
    unipar install horovod --force
    """
    typer.echo(install_backend(name, force=force))


def install_backend(name: str, *, force: bool = False) -> str:
    """Build and install the library of a backend (again with `force`); return what was done."""
    from unipar.backend.registry import find_backend

    backend = find_backend(name)
    if threading.current_thread() is not threading.main_thread():
        return backend.install(force=force)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM cleans up as Ctrl-C does
    try:
        return backend.install(force=force)
    finally:
        signal.signal(signal.SIGTERM, before)
