"""What tests of worlds share: how workers find `tests.support.entries`, and whether anything is left of them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOON = 20.0
"""Seconds that something may take which is done at once, on a slow machine with other work: far below all that is set
to wait longer, or for ever."""

PYTHONPATH_VARIABLE = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


@contextmanager
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A temporary folder with a short name, as worlds like it; whatever they put there must be gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ut-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        yield folder
        eventually(lambda: not os.listdir(folder), f"{os.listdir(folder)} left in the temporary folder")
    finally:
        shutil.rmtree(folder)


def eventually(true: Callable[[], bool], otherwise: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, otherwise
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether this process still does anything."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def read_pid(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text("utf-8") != "", f"no {path.name}", 60.0)
    return int(path.read_text("utf-8"))
