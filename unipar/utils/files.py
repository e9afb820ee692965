"""Write a file whole or not at all; the user's cache folder; PATH with this environment's scripts first."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder in which what is compiled is kept for this user's next run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unipar"


def path_with_scripts() -> str:
    """Return PATH with this environment's scripts first: what came from PyPI is found without activating anything."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


@contextmanager
def whole(file: Path) -> Generator[Path]:
    """Context manager: yields a path beside `file` to write to, and gives it that name if the body succeeds.

    Readers see all of the new file or none of it; if the body fails, what was there stays and nothing is left beside.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(file)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_file_atomically(file: Path, text: str) -> None:
    """Write all of a file or nothing; where it cannot be written, what was there stays and the error names `file`."""
    try:
        with whole(file) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(file)) from None
