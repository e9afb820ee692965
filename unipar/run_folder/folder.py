"""Creation, locking and overwriting of a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from unipar.errors import ConfigError, OutExists
from unipar.run_folder.error_file import read_error_file, read_run_error
from unipar.run_folder.layout import CHECKPOINTS_OF_RUN, attempts_path, read_launch_file
from unipar.run_folder.run_attempts import count_attempts, reached_step
from unipar.utils.files import write_file_atomically
from unipar.utils.procfs import boot_id

RUN_FILES = {"config.json": ({"batch", "train"},), "launch.json": ({"task"}, {"script"})}
"""Files by which a run folder is recognised, each with sets of keys; the file has all keys of at least one set."""

SUBMISSIONS = "submit"
"""Folder in a run folder for what `unipar submit` has written; the run itself may not have begun yet."""

FOLDERS_THAT_STAY = ("compare", "worlds", "verify", "scale", SUBMISSIONS)
"""Folders that may exist in a run folder before the run, and that are kept when the run is overwritten."""

SECONDS_FOR_PROBE = 0.1
"""Seconds that locking waits for `is_locked`, which holds the lock for a moment, in another process."""


def numbered_folders(base: Path) -> Iterator[Path]:
    """Yield base, base-2, base-3, ... without end: the names of runs whose config gives no `out`."""
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def first_free_folder(base: Path) -> Path:
    """Return the first of base, base-2, ... that holds no run and nothing else that would be in a run's way."""
    return next(out for out in numbered_folders(base) if is_free(out))


def existing_numbered_folders(base: Path) -> list[Path]:
    """Return the folders named base, base-2, ... that exist."""
    if not base.parent.is_dir():
        return []
    named = re.compile(rf"{re.escape(base.name)}(-\d+)?")
    return [path for path in base.parent.iterdir() if named.fullmatch(path.name) and path.is_dir()]


def is_free(out: Path) -> bool:
    """Return whether a run whose config gives no `out` may take this folder; it may not if another was submitted."""
    if not os.path.lexists(out):
        return True
    try:
        return out.is_dir() and not (out / SUBMISSIONS).exists() and not _files_in_the_way(out)
    except OSError:  # a folder that cannot be listed
        return False


def check_run_folder(out: Path, *, overwrite: bool) -> None:
    """Raise OutExists or ConfigError unless a run may be written to `out`."""
    if not os.path.lexists(out):
        _check_parent_folder(out)
        return
    if not out.is_dir():
        raise OutExists(f"out: {out} is {_describe_path(out)}; name another folder (out: ..., or --out DIR)")
    if not os.access(out, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"out: {out} is not writable; {_NAME_ANOTHER_FOLDER}")
    taken = _files_in_the_way(out)
    if not taken:
        return
    if not overwrite:
        raise OutExists(
            f"out: {out} already exists; name another folder (out: another/folder, or --out DIR), "
            "or overwrite it (--overwrite, or launch(..., overwrite=True))"
        )
    if reason := _why_not_a_run(out):
        raise OutExists(
            f"out: {out} is not a run folder of unipar ({reason}), so it is not overwritten; "
            "name another folder, or remove it yourself"
        )


_NAME_ANOTHER_FOLDER = "name a folder that you can write to (out: ..., or --out DIR)"


def _check_parent_folder(out: Path) -> None:
    """Raise ConfigError unless `out` can be created in the nearest folder above it that exists."""
    above = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise ConfigError(f"out: {out} cannot be created: {above} is {_describe_path(above)}; {_NAME_ANOTHER_FOLDER}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"out: {out} cannot be created: {above} is not writable; {_NAME_ANOTHER_FOLDER}")


def _describe_path(path: Path) -> str:
    return "a broken symbolic link" if path.is_symlink() and not path.exists() else "a file"


def _why_not_a_run(out: Path) -> str:
    """Return why a folder is not recognised as a run folder, or "" if it is one."""
    for name, choices in RUN_FILES.items():
        if not (out / name).is_file():
            return f"no {name} in it"
        try:
            content: Any = json.loads((out / name).read_bytes())
        except ValueError:
            content = None
        if not isinstance(content, dict) or not any(keys <= content.keys() for keys in choices):
            return f"its {name} is not a run's"
    return ""


def check_folder_content(out: Path, whose: str, names: Collection[str]) -> list[str]:
    """Return the names in a command's folder; raise OutExists if there are others than `names` and world-*."""
    present = sorted(path.name for path in out.iterdir())
    strange = [name for name in present if name not in names and not name.startswith("world-")]
    if strange:
        raise OutExists(
            f"{out} holds {strange[0]}, which does not belong to {whose}: move it away, or name another folder (out)"
        )
    return present


def clear_own_files(out: Path, whose: str, names: Collection[str], earlier: str, *, overwrite: bool) -> None:
    """Delete the files of a command's earlier run; raise OutExists if there are any and `overwrite` is false."""
    present = check_folder_content(out, whose, names)
    if present and not overwrite:
        raise OutExists(
            f"{out} holds an earlier {earlier}: give --overwrite to replace it, or name another folder (out)"
        )
    for name in present:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def create_run_folder(out: Path, config: str, launch: str, *, overwrite: bool) -> Generator[None]:
    """Context manager: creates or clears the run folder, writes config and launch to it, and locks it for the body."""
    with lock_folder(out):
        check_run_folder(out, overwrite=overwrite)
        with explain_write_errors(out):
            # RUN_FILES last: if the deletion is interrupted, the folder is still recognised and can be overwritten
            for path in sorted(_files_in_the_way(out), key=lambda path: path.name in RUN_FILES):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        write_run_files(out, config, launch)
        yield


@contextmanager
def claim_run_folder(base: Path) -> Generator[Path]:
    """Context manager: creates the first of base, base-2, ... that is free, and locks it for the body; yields its path.

    Of several processes that do so at the same time, each gets another folder: a folder belongs to the process that
    has created its config.json, which is empty until `write_run_files`.
    """
    for out in numbered_folders(base):
        if not is_free(out):
            continue
        with ExitStack() as stack:
            try:
                check_run_folder(out, overwrite=False)
                stack.enter_context(lock_folder(out))
            except OutExists:  # another process was faster
                continue
            if _create_config_file(out):
                yield out
                return


def _create_config_file(out: Path) -> bool:
    """Create an empty config.json; return False if there is one. The lock alone may not hold between machines."""
    with explain_write_errors(out):
        try:
            os.close(os.open(out / next(iter(RUN_FILES)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
    return True


@contextmanager
def continue_run_folder(out: Path, config: str, launch: str, *, anew: bool = False) -> Generator[None]:
    """Context manager: locks the folder of a run that goes on, and makes it ready for that, as `begin_next_attempt`."""
    with lock_folder(out):
        begin_next_attempt(out, config, launch, anew=anew)
        yield


def begin_next_attempt(
    out: Path, config: str, launch: str, ended: Mapping[str, Any] | None = None, *, anew: bool = False
) -> None:
    """Make a locked run folder ready for another attempt, whose config and launch are written to it.

    Those of the attempt before become a line of attempts.jsonl, with the step that it had reached and the error with
    which it ended: `ended`, or what its files say. Its logs and errors are moved to attempt-N/; if the next one begins
    `anew`, its checkpoints too, which are of another training.
    """
    with explain_write_errors(out):
        row: dict[str, Any] = {name: json.loads((out / name).read_bytes()) for name in RUN_FILES}
        kept = out / f"attempt-{count_attempts(out) + 1}"
        end = {"step": reached_step(out), **(ended if ended is not None else _recorded_end(out))}
        if "message" in end:
            moved = str(out.resolve() / "rank-"), str(kept.resolve() / "rank-")
            end["message"] = str(end["message"]).replace(*moved)
        row["ended"] = end
        with attempts_path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for pattern in (*_FILES_OF_AN_ATTEMPT, *((CHECKPOINTS_OF_RUN,) if anew else ())):
            for path in out.glob(pattern):
                kept.mkdir(exist_ok=True)
                path.rename(kept / path.name)
        for path in out.glob("rank-*.beat"):
            path.unlink()
    write_run_files(out, config, launch)


_FILES_OF_AN_ATTEMPT = ("error.json", "rank-*.error.json", "rank-*.log", "rank-*.stack", "rank-*.collectives.json")
"""Files that each attempt has for itself."""


def _recorded_end(out: Path) -> dict[str, Any]:
    """Return kind, message and time of the error with which an attempt ended; empty if none was recorded."""
    errors = [error for path in out.glob("rank-*.error.json") if (error := read_error_file(path)) is not None]
    run_error = read_run_error(out)
    first = run_error or min(errors, key=lambda error: (error.caused_by_other_rank, error.time), default=None)
    return {} if first is None else {"kind": first.kind, "message": first.message, "time": first.time}


def newest_run_folder(base: Path, *, alone: bool, job: Sequence[str] | None = None) -> Path | None:
    """Return the newest run among base, base-2, ...; with `alone` only `base` counts. None if there is none.

    Runs that have ended before their first step are passed over, unless there are no others. `job`: names of a job, one
    of which the run must have; None: any run counts.
    """
    runs = _runs_newest_first(base, alone=alone)
    if job is not None:
        runs = [path for path in runs if not set(job).isdisjoint(read_launch_file(path).get("job", ()))]
    return next((run for run in runs if reached_step(run) or is_locked(run)), runs[0] if runs else None)


def newer_run_without_step(base: Path, run: Path, *, alone: bool) -> Path | None:
    """Return the newest run among base, base-2, ... if `newest_run_folder` has passed over it for another."""
    newest = next(iter(_runs_newest_first(base, alone=alone)), run)
    return None if newest == run else newest


def _runs_newest_first(base: Path, *, alone: bool) -> list[Path]:
    named = [base] if alone else existing_numbered_folders(base)
    runs = [path for path in named if path.is_dir() and not _why_not_a_run(path)]
    return sorted(runs, key=lambda path: (path / next(iter(RUN_FILES))).stat().st_mtime_ns, reverse=True)


def launch_time(out: Path) -> float | None:
    """Return the time of time.monotonic() at which a run was launched; None if this machine has started again since."""
    launch = read_launch_file(out)
    return launch.get("launched") if launch.get("boot") == boot_id() else None


def write_run_files(out: Path, config: str, launch: str) -> None:
    """Write the texts of RUN_FILES to a run folder."""
    with explain_write_errors(out):
        for name, text in zip(RUN_FILES, (config, launch), strict=True):
            write_file_atomically(out / name, text, flush=True)


@contextmanager
def explain_write_errors(out: Path) -> Generator[None]:
    """Context manager: turns an OSError into a ConfigError that names the folder and the path."""
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
    """Context manager: creates the folder if it does not exist, and locks it against other processes for the body."""
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take_lock(out, folder)
        yield
    finally:
        os.close(folder)


def _take_lock(out: Path, folder: int) -> None:
    until = time.monotonic() + SECONDS_FOR_PROBE
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OutExists(
                    f"out: {out} is in use by a run that has not ended; wait for its end, or name another folder"
                ) from None
            time.sleep(0.01)


def is_locked(out: Path) -> bool:
    """Return whether a process holds the lock of a folder: the system releases it when that process ends, or dies."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
    return False
