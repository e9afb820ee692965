"""`unipar install`."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer


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
