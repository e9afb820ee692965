"""Atomic writing of files; the user's cache folder; PATH with this environment's scripts first; files of libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_LIBRARY_FOLDERS: Final = tuple(
    {os.path.realpath(path) for path in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix) if path}
)
"""Folders of installed packages and of the standard library."""


def is_library_file(file: str) -> bool:
    """Return whether a file belongs to an installed package or to the standard library."""
    return is_in_folders(file, _LIBRARY_FOLDERS)


def is_in_folders(file: str, folders: Iterable[str]) -> bool:
    """Return whether a file is in one of these folders, or below it; links are followed."""
    path = os.path.realpath(file)
    return any(path.startswith(folder + os.sep) for folder in folders)


def cache_folder() -> Path:
    """Return the folder that keeps compiled files for later runs of the same user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unipar"


def relative_path(path: Path) -> Path:
    """Return an absolute path relative to the working directory if it is in there, else unchanged."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def path_with_scripts() -> str:
    """Return PATH with this environment's scripts first, so that they are found without activating the environment."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


@contextmanager
def whole(file: Path) -> Generator[Path]:
    """Context manager: yields a temporary path beside `file`, and renames it to `file` if the body succeeds.

    Readers see the complete new file or the old one. If the body fails, the old file stays and the temporary one is
    removed.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(file)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_file_atomically(file: Path, content: str | bytes, *, flush: bool = False) -> None:
    """Write a file completely or not at all; if that fails, the old file stays and the OSError names `file`.

    `flush`: it is on the disk before it has its name, so that this holds when the machine goes down as well.
    """
    try:
        with whole(file) as partial, partial.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            if flush:
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(file)) from None


def short_temporary_folder() -> str:
    """Return the temporary folder, or /tmp if its path is long: paths of sockets have at most 108 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 40 else "/tmp"
