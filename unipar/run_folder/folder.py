"""Make, own and overwrite a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unipar.errors import ConfigError, OutExists

RUN_FILES = {"config.json": ({"batch", "train"},), "launch.json": ({"task"}, {"script"})}
"""What a run's folder holds: files, and the keys that they have, one set of them at least."""


FOLDERS_THAT_STAY = ("compare", "worlds", "verify", "scale")
"""What may lie in it before a run, and stays when the run is overwritten."""


def check_run_folder(out: Path, *, overwrite: bool) -> None:
    """Raise unless a run may be written to `out`."""
    if not os.path.lexists(out):
        _check_parent_folder(out)
        return
    if not out.is_dir():
        raise OutExists(f"out: {out} is {_describe_path(out)}; name another folder (out: ..., or --out DIR)")
    if not os.access(out, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"out: {out} may not be written to; {_NAME_ANOTHER_FOLDER}")
    taken = _files_in_the_way(out)
    if not taken:
        return
    if not overwrite:
        raise OutExists(
            f"out: {out} is there already; keep it and write elsewhere (out: another/folder, or --out DIR), "
            "or write over it (--overwrite, or launch(..., overwrite=True))"
        )
    if strange := _why_not_a_run(out):
        raise OutExists(
            f"out: {out} holds no run of ours ({strange}), so it is not overwritten; "
            "name another folder, or remove it yourself"
        )


_NAME_ANOTHER_FOLDER = "name a folder in which you may write (out: ..., or --out DIR)"


def _check_parent_folder(out: Path) -> None:
    """Whether the nearest folder that is there would take it."""
    above = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise ConfigError(f"out: {out} cannot be made: {above} is {_describe_path(above)}; {_NAME_ANOTHER_FOLDER}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"out: {out} cannot be made: {above} may not be written to; {_NAME_ANOTHER_FOLDER}")


def _describe_path(path: Path) -> str:
    return "a link that leads nowhere" if path.is_symlink() and not path.exists() else "a file"


def _why_not_a_run(out: Path) -> str:
    """Why this folder is not one of a run; empty: it is one."""
    for name, choices in RUN_FILES.items():
        if not (out / name).is_file():
            return f"no {name} in it"
        try:
            held: Any = json.loads((out / name).read_bytes())
        except ValueError:
            held = None
        if not isinstance(held, dict) or not any(keys <= held.keys() for keys in choices):
            return f"its {name} is not a run's"
    return ""


def check_folder_content(out: Path, whose: str, names: Collection[str]) -> list[str]:
    """What lies there: a verb's own files, `names` and world-*, and nothing else."""
    there = sorted(path.name for path in out.iterdir())
    strange = [name for name in there if name not in names and not name.startswith("world-")]
    if strange:
        raise OutExists(f"{out} holds {strange[0]}, which is not {whose}'s: move it away, or give another out")
    return there


def clear_own_files(out: Path, whose: str, names: Collection[str], earlier: str, *, overwrite: bool) -> None:
    """A verb's own files of an earlier time may go when that is said; nothing else does."""
    there = check_folder_content(out, whose, names)
    if there and not overwrite:
        raise OutExists(f"{out} holds an earlier {earlier}: give --overwrite to replace it, or another out")
    for name in there:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def create_run_folder(out: Path, config: str, launch: str, *, overwrite: bool) -> Generator[None]:
    """A folder with nothing in it but what this run is; until the body ends it is this run's alone."""
    with lock_folder(out):
        check_run_folder(out, overwrite=overwrite)
        with explain_write_errors(out):
            for path in sorted(
                _files_in_the_way(out), key=lambda path: path.name in RUN_FILES
            ):  # what tells that it is ours, last
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            for name, text in zip(RUN_FILES, (config, launch), strict=True):
                (out / name).write_text(text, encoding="utf-8")
        yield


@contextmanager
def explain_write_errors(out: Path) -> Generator[None]:
    """What the system refuses, in a sentence."""
    try:
        yield
    except OSError as e:
        where = e.filename if e.filename and str(e.filename) != str(out) else None
        at = f" at {where}" if where else ""
        raise ConfigError(f"out: {out} cannot be written{at} ({e.strerror}); {_NAME_ANOTHER_FOLDER}") from None


def _files_in_the_way(out: Path) -> list[Path]:
    return [path for path in out.iterdir() if path.name not in FOLDERS_THAT_STAY]


@contextmanager
def lock_folder(out: Path) -> Generator[None]:
    """The folder, made if need be, is this process's alone until the body ends."""
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
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
