"""Every change that writing a checkpoint makes to a file system, as one small object: a test can make each one fail."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, final

from unipar.utils.address import Location

_EXCHANGE = 2
_AT_FDCWD = -100


class OutputFile:
    """New file that is open for writing."""

    def __init__(self, path: Location, number: int) -> None:
        self.path = path
        self._number = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.close()

    def write(self, data: memoryview) -> int:
        """Write some of the bytes, at least one; return how many."""
        return os.write(self._number, data)

    def flush(self) -> None:
        """Return when all that was written is on the device (fsync)."""
        os.fsync(self._number)

    def close(self) -> None:
        """Close the file, which is given up if it was not flushed; a second time does nothing."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


class Disk:
    """Local or shared file system."""

    def create(self, path: Path) -> OutputFile:
        """Create a file that must not exist, and open it for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return OutputFile(path, os.open(path, flags, 0o666))

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Create a folder that must not exist."""
        path.mkdir(mode)

    def make_parents(self, path: Path) -> None:
        """Create a folder and those above it where they are missing, and flush the entries of those that are new."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            self.flush_folder(folder.parent)

    def flush_folder(self, path: Path) -> None:
        """Return when the folder's entries are on the device (fsync)."""
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def change_mode(self, path: Path, mode: int) -> None:
        """Set the permissions of a folder."""
        path.chmod(mode)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder to a name that is free."""
        os.rename(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap the names of two folders at once; return False where the file system cannot."""
        return _exchange_names(one, other)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder and all in it, without following symlinks; what is gone already is no error."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes this user may still write to the file system of a folder."""
        volume = os.statvfs(path)
        return volume.f_bavail * volume.f_frsize

    @contextmanager
    def lock(self, path: Path) -> Generator[None]:
        """Context manager: hold the lock of a folder, so that others see that its writer lives."""
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks: `is_abandoned` then goes by age
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(number)


@final
class _LibC:
    """The C library's renameat2, where it has it."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self.renameat2 = getattr(library, "renameat2", None)


def _exchange_names(one: Path, other: Path) -> bool:
    rename = _LibC().renameat2
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def lock_is_free(path: Path) -> bool | None:
    """Return whether no living process holds the lock of a folder; None where the file system cannot tell."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(number)
    return True
