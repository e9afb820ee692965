"""A run's folder: made once, owned by one run at a time, removed only when it is one of ours."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from unipar.errors import OutExists

MARK = "config.json"
"""What a folder of ours holds."""

BESIDE = ("compare",)
"""What may lie in it before a run, and stays when the run is overwritten."""


def look(out: Path, *, overwrite: bool) -> None:
    """Raise unless a run may be written to `out`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise OutExists(f"out: {out} is a file; name another folder (out: ..., or --out DIR)")
    taken = _taken(out)
    if not taken:
        return
    if not overwrite:
        raise OutExists(
            f"out: {out} is there already; keep it and write elsewhere (out: another/folder, or --out DIR), "
            "or write over it (--overwrite, or launch(..., overwrite=True))"
        )
    if out / MARK not in taken:
        raise OutExists(
            f"out: {out} holds no run of ours (no {MARK} in it), so it is not overwritten; "
            "name another folder, or remove it yourself"
        )


@contextmanager
def made(out: Path, config: str, launch: str, *, overwrite: bool) -> Generator[None]:
    """A folder with nothing in it but what this run is; until the body ends it is this run's alone."""
    out.mkdir(parents=True, exist_ok=True)
    with owned(out):
        look(out, overwrite=overwrite)
        for path in _taken(out):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (out / MARK).write_text(config, encoding="utf-8")
        (out / "launch.json").write_text(launch, encoding="utf-8")
        yield


def _taken(out: Path) -> list[Path]:
    return [path for path in out.iterdir() if path.name not in BESIDE]


@contextmanager
def owned(out: Path) -> Generator[None]:
    """The folder is this process's alone until the body ends."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutExists(
                f"out: {out} belongs to a run that still goes on; wait for its end, or name another folder"
            ) from None
        yield
    finally:
        os.close(folder)
