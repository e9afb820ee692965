"""Arguments and the progress bar that the commands of `unipar checkpoint` share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import read_location

if TYPE_CHECKING:
    from unipar.utils.address import Location

CheckpointArgument = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A checkpoint; of a run folder, its newest.", show_default=False),
]


def checkpoint_path(text: str) -> Location:
    """Return the checkpoint that a path means: itself, or the newest in the run folder or folder that it is."""
    return checkpoints_meant(text)[0]


def checkpoints_meant(text: str) -> list[Location]:
    """Return the checkpoint that a path or an address is, or those in the run folder or folder that it is."""
    from unipar.checkpoint.format.names import MANIFEST_FILE, step_of_folder
    from unipar.checkpoint.overview.listing import folder_with_checkpoints
    from unipar.checkpoint.protocol.verifying import find_checkpoints

    place = read_location(text)
    if step_of_folder(place.name) is not None:
        return [place]
    if isinstance(place, Path) and ((place / MANIFEST_FILE).exists() or place.is_symlink()):
        return [place]
    return [checkpoint.path for checkpoint in find_checkpoints(folder_with_checkpoints(place))]


@contextmanager
def progress_bar(text: str) -> Generator[Callable[[int, int], None] | None]:
    """Context manager: a callback with what is done and the total, drawn on a terminal; None elsewhere."""
    from unipar.utils.terminal import Terminal

    terminal = Terminal(sys.stderr)
    if not terminal.can_draw:
        yield None
        return
    terminal.draw_spinner(text)
    try:
        yield lambda done, total: terminal.move_bar(completed=done, total=total)
    finally:
        terminal.stop()
