"""`unipar install`."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from unipar.backend.registry import find_backend


def install(
    name: Annotated[str, typer.Argument(metavar="BACKEND", help="As `unipar backends` calls it.", show_default=False)],
    *,
    force: Annotated[bool, typer.Option("--force", help="Build it anew, though it is there.")] = False,
) -> None:
    """Build what pip alone cannot install.

    \b
    unipar install horovod
    unipar install horovod --force
    """
    from unipar.cli.commands.install import install_backend as installed

    typer.echo(installed(name, force=force))


def install_backend(name: str, *, force: bool = False) -> str:
    """Builds and installs the library of a backend, anew with `force`; returns what was done."""
    backend = find_backend(name)
    if threading.current_thread() is not threading.main_thread():
        return backend.install(force=force)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up as Ctrl-C does
    try:
        return backend.install(force=force)
    finally:
        signal.signal(signal.SIGTERM, before)
